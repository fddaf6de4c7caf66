"""Make the bundled nano model, or measure it.

python -m pipelines.pretrain_nano train [--config FILE] [--field=value ...]    pre-train; resumes where it stopped
python -m pipelines.pretrain_nano save [--config FILE]                         newest checkpoint -> --into FOLDER
python -m pipelines.pretrain_nano quality [--weights FOLDER]                   the model card's table
python -m pipelines.pretrain_nano compare --weights A0 A1 --against B0 B1      two ways of training, folders by seed
"""

import argparse
import logging
import sys
from pathlib import Path

from aarlib.nano import WEIGHTS
from aarlib.nano.config import PretrainConfig

CONFIG = Path(__file__).parent / "configs" / "pretrain_nano.toml"


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m pipelines.pretrain_nano", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("verb", choices=("train", "save", "quality", "compare"))
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--into", type=Path, default=WEIGHTS, help="save: the Hugging Face folder to write")
    parser.add_argument("--weights", type=Path, nargs="+", default=[WEIGHTS], help="the folders to measure")
    parser.add_argument("--against", type=Path, nargs="+", default=[], help="compare: the other folders")
    parser.add_argument("--items", type=int, default=500, help="quality, compare: items for each measure")
    parser.add_argument(
        "--write-card", action="store_true", help="quality: write the table into the folder's README.md"
    )
    parser.add_argument("--print-config", action="store_true")
    return parser.parse_known_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options, overrides = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        run(options, PretrainConfig.from_toml(options.config, overrides))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, config: PretrainConfig) -> None:
    if options.print_config:
        print(config.to_json())
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.verb == "train":
        from aarlib.nano.pretrain import pretrain
        from aarlib.runtime.tracking import single_run

        run = config.storage / config.name
        with single_run(config.tracking, config.storage, run, config.model_dump(mode="json")) as logged:
            print(pretrain(config, logged.log))
    elif options.verb == "save":
        from aarlib.nano.pretrain import save_newest

        print(save_newest(config, options.into))
    elif options.verb == "compare":
        from aarlib.nano.comparison import compare, comparison_table

        rows = compare(options.weights, options.against, config.world, options.items)
        print(comparison_table(rows, (str(options.weights[0]), str(options.against[0]))))
    else:
        from aarlib.nano.quality import card_table, measure, write_card

        (folder,) = options.weights
        table = card_table(measure(folder, config.world, options.items, config.real_text))
        print(table)
        if options.write_card:
            write_card(folder, table)


if __name__ == "__main__":
    raise SystemExit(main())
