"""What test_text_training runs in a process of its own: FDAA through `train_runs`, its rows placed without Ray Data."""

import os
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from aarlib.data.chat import Encoded
from aarlib.identities import randomise_head
from aarlib.runtime import training_run
from aarlib.runtime.batches import GlobalBatch, encoded_rows
from aarlib.runtime.checkpoints import whole_values
from aarlib.runtime.engine import Setup, load_base
from aarlib.runtime.population import Pending, groups
from aarlib.runtime.run_directory import claim
from aarlib.runtime.session import Session
from aarlib.runtime.sharding import frozen_hash
from aarlib.runtime.text_corpus import _placed, find_texts, read_windows, unit_order
from aarlib.runtime.tracking import Tracking
from aarlib.training.config import RunConfig


def windows_of(config: RunConfig) -> pa.Table:
    sources = pa.Table.from_pylist([source._asdict() for source in find_texts(config.data)])
    return read_windows(sources, config.model.model_dump(mode="json"), config.data.model_dump(mode="json"))


def epoch_rows(config: RunConfig, table: pa.Table, epoch: int) -> list[Encoded]:
    """The rows of an epoch in order, with their units."""
    train = table.filter(pa.array(~table["held_out"].to_numpy()))
    domains = train["pattern"].to_numpy()
    ids = [train["row_id"].filter(pa.array(domains == index)).to_pylist() for index in range(len(config.data.domains))]
    unit_rows = config.data.unit_rows
    places = unit_order(ids, unit_rows, f"0/{epoch}")
    first_unit = epoch * sum(map(len, places.values())) // unit_rows
    return encoded_rows(_placed(train, places, unit_rows, first_unit).sort_by("place"))


class LocalSession(Session):
    """A session whose rows come from its own process."""

    def batches(self, seed: int, start: int) -> Iterator[GlobalBatch]:
        assert start == 0
        table, size = windows_of(self.config), self.config.optim.global_batch
        for epoch in range(self.config.optim.epochs):
            rows = epoch_rows(self.config, table, epoch)
            yield from (GlobalBatch(rows[first : first + size]) for first in range(0, len(rows), size))


def process(rank: int, port: int, configs: list[dict[str, Any]], found: str) -> None:
    """Train every config; store the parameters that each run had before each step, by config and run."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=1)
    torch.save({values["name"]: train(RunConfig.from_mapping(values)) for values in configs}, found)
    dist.destroy_process_group()


def random_start(method: Any) -> None:
    """Heads begin with scores of order 1: at zero, the bias's gradient is rounding noise (a softmax does not see it), along which
    AdamW takes whole steps."""
    stock = method.attach

    def attach(model: Any) -> Any:
        handle = stock(model)
        randomise_head(handle, method.seed, scale=0.5)
        return handle

    method.attach = attach


def train(config: RunConfig) -> dict[str, list[dict[str, torch.Tensor]]]:
    device = torch.device("cpu")
    model, tokenizer = load_base(config.model, Setup(config.optim, 0, 0, 1, 1), device)
    table = windows_of(config)
    held_out = encoded_rows(table.filter(table["held_out"]))[:2]
    session = LocalSession(
        config, claim(config), lambda: None, Tracking("", "", None, {}), len(epoch_rows(config, table, 0)), 0, 1, device,
        model, tokenizer, [held_out], frozen_hash(model),
    )  # fmt: skip
    seen: dict[str, list[dict[str, torch.Tensor]]] = {run.name: [] for run in config.runs()}
    stock_step = training_run.train_step

    def spying_step(engine: Any, *arguments: Any) -> Any:
        run = names[id(engine.module.method)]
        seen[run].append(whole_values(list(engine.module.trained.named_parameters())))
        return stock_step(engine, *arguments)

    stock_build, names = training_run.build_method, dict[int, str]()

    def naming_build(method: Any, seed: int) -> Any:
        built = stock_build(method, seed)
        label = next(run.name for run in config.runs() if (run.method, run.seed) == (method, seed))
        names[id(built)] = label
        random_start(built)
        return built

    training_run.train_step, training_run.build_method = spying_step, naming_build
    try:
        for group in groups([Pending(run, None) for run in config.runs()], config.optim.population):
            training_run.train_runs(session, group)
    finally:
        training_run.train_step, training_run.build_method = stock_step, stock_build
    return seen
