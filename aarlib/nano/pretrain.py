"""Pre-training of the nano model: a plain loop on one device, seeded, resumable; its schedule can meet a wall-clock."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aarlib.aar.attach import attach_aar
from aarlib.config import write_text_atomically
from aarlib.moe.loading import load_model
from aarlib.nano.config import PretrainConfig
from aarlib.nano.corpus import draw_batch, read_real_text, tokenizer_texts
from aarlib.nano.folder import check_world, save_folder, write_world
from aarlib.nano.model import Network, build_network
from aarlib.nano.muon import Muon
from aarlib.nano.objective import losses
from aarlib.nano.tokenizer import special_ids, train_tokenizer
from aarlib.training.adapter import save_adapter

logger = logging.getLogger("aarlib")

Log = Callable[[Mapping[str, float], int], None]


class Position(NamedTuple):
    """How far a run is: optimizer steps, tokens seen, and progress in [0, 1] through its schedule."""

    step: int = 0
    tokens: int = 0
    progress: float = 0.0


class Clock:
    """Progress is tokens over the budget, or the share of the time up to `stop_at` where that is further."""

    def __init__(self, config: PretrainConfig, start: Position) -> None:
        self.budget, self.start, self.began = config.token_budget, start, time.time()
        self.stop = None
        if config.stop_at is not None:
            self.stop = (config.stop_at if config.stop_at.tzinfo else config.stop_at.replace(tzinfo=UTC)).timestamp()
            if self.stop <= self.began:
                raise ValueError(f"stop_at = {config.stop_at} has passed; name a later time or leave it out")

    def progress(self, tokens: int) -> float:
        by_tokens = tokens / self.budget
        if self.stop is None:
            return min(1.0, by_tokens)
        elapsed = (time.time() - self.began) / (self.stop - self.began)
        return min(1.0, max(by_tokens, self.start.progress + (1 - self.start.progress) * elapsed))


def schedule(config: PretrainConfig, progress: float) -> float:
    """Share of the peak learning rates: linear warm-up, constant, then linear to zero."""
    if progress < config.warmup:
        return (progress + 1e-3) / (config.warmup + 1e-3)
    return min(1.0, (1 - progress) / (1 - config.decay_from))


def pretrain(config: PretrainConfig, log: Log | None = None) -> Path:
    """Run to the end of the schedule, from the newest checkpoint if there is one; the folder of the final model.

    `log` gets what metrics.jsonl gets: numbers by name, and the step. With AAR the folder has an `adapter` in it.
    """
    torch.set_num_threads(config.threads)
    run = config.storage / config.name
    real = read_real_text(config.real_text if config.world.mixture.get("real", 0) > 0 else None)
    tokenizer = prepare_tokenizer(config, run, real)
    network = build_network(config, tokenizer)
    network.model.set_experts_implementation(config.experts_implementation)
    optimizers = make_optimizers(config, network)
    position = resume(run, network, optimizers)
    write_text_atomically(run / "config.json", config.to_json() + "\n")
    truncate_metrics(run / "metrics.jsonl", position.step)
    clock, began = Clock(config, position), time.time()
    seen = position.tokens
    while position.progress < 1.0:
        record, position = train_step(config, network, optimizers, tokenizer, real, position, clock)
        if position.step % config.log_every == 0 or position.progress >= 1.0:
            record["tokens_per_second"] = (position.tokens - seen) / (time.time() - began)
            append_metrics(run / "metrics.jsonl", record)
            if log is not None:
                log({name: value for name, value in record.items() if name != "step"}, record["step"])
        if position.step % config.checkpoint_every == 0 or position.progress >= 1.0:
            save_checkpoint(run, network, optimizers, position)
    save_network(config, network, tokenizer, run / "model")
    return run / "model"


def prepare_tokenizer(config: PretrainConfig, run: Path, real: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """The run's tokenizer: the saved one on a resume (of the same world, else a ValueError), otherwise a new one."""
    folder = run / "tokenizer"
    if folder.is_dir():
        check_world(folder, config.world)
        return AutoTokenizer.from_pretrained(folder)
    tokenizer = train_tokenizer(tokenizer_texts(config.world, real), config.model.vocab_size, config.model.context)
    temporary = run / f".tokenizer.{os.getpid()}.tmp"
    tokenizer.save_pretrained(temporary)
    write_world(temporary, config.world)
    os.replace(temporary, folder)
    return tokenizer


def make_optimizers(config: PretrainConfig, network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the attention and expert matrices; AdamW for embeddings, output head, norms and routers."""
    matrices, rest = [], []
    for name, parameter in network.named_parameters().items():
        inside = ".layers." in name and parameter.dim() > 1 and not name.endswith("gate.weight")
        (matrices if inside else rest).append(parameter)
    return [
        Muon(matrices, lr=config.muon_learning_rate, weight_decay=config.weight_decay),
        torch.optim.AdamW(rest, lr=config.learning_rate, betas=config.betas, weight_decay=0.0),
    ]


def train_step(
    config: PretrainConfig,
    network: Network,
    optimizers: list[torch.optim.Optimizer],
    tokenizer: PreTrainedTokenizerFast,
    real: tuple[str, ...],
    position: Position,
    clock: Clock,
) -> tuple[dict[str, Any], Position]:
    batch = draw_batch(config, tokenizer, real, position.step, position.progress)
    tensors = [tensor.to(config.device) for tensor in batch.tensors(special_ids(tokenizer).pad)]
    rate = schedule(config, position.progress)
    for optimizer, peak in zip(optimizers, (config.muon_learning_rate, config.learning_rate), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate
    with torch.autocast(torch.device(config.device).type, torch.bfloat16, enabled=config.autocast):
        parts = losses(network.model, *tensors)
    (parts.ce + config.balance_coefficient * parts.balance + config.z_coefficient * parts.z).backward()
    norm = torch.nn.utils.clip_grad_norm_(network.named_parameters().values(), config.max_grad_norm)
    if not torch.isfinite(norm):
        raise ValueError(
            f"step {position.step}: the gradient is not finite; lower learning_rate = {config.learning_rate}"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    tokens = position.tokens + sum(batch.num_tokens.values())
    position = Position(position.step + 1, tokens, clock.progress(tokens))
    record = {
        "step": position.step,
        "tokens": tokens,
        "progress": position.progress,
        "train/ce": parts.ce.item(),
        "train/balance": parts.balance.item(),
        "train/z": parts.z.item(),
        "router/smallest_share": parts.smallest_share.item(),
        "optim/lr": config.learning_rate * rate,
        "optim/grad_norm": norm.item(),
    }
    return record, position


def append_metrics(path: Path, record: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    logger.info(
        "step %d  tokens %.2fM  progress %.3f  ce %.4f  balance %.3f  lr %.1e  %.0f tokens/s",
        record["step"], record["tokens"] / 1e6, record["progress"], record["train/ce"], record["train/balance"],
        record["optim/lr"], record["tokens_per_second"],
    )  # fmt: skip


def truncate_metrics(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint that the run resumes from."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text_atomically(path, "".join(line for line in lines if json.loads(line)["step"] <= step))


def checkpoints(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoint-*"))


def save_checkpoint(run: Path, network: Network, optimizers: list[torch.optim.Optimizer], position: Position) -> None:
    """checkpoint-<step>/ with weights, optimizer state and position; renamed when whole, the newest two are kept."""
    final = run / f"checkpoint-{position.step:07d}"
    temporary = run / f".{final.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    save_file(network.state(), temporary / "model.safetensors")
    torch.save([optimizer.state_dict() for optimizer in optimizers], temporary / "optimizers.pt")
    (temporary / "position.json").write_text(json.dumps(position._asdict()), encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    os.replace(temporary, final)
    for old in checkpoints(run)[:-2]:
        shutil.rmtree(old)


def resume(run: Path, network: Network, optimizers: list[torch.optim.Optimizer]) -> Position:
    """Load the newest checkpoint into `network` and `optimizers`; the start of a run where there is none."""
    found = checkpoints(run)
    if not found:
        return Position()
    network.load(load_file(found[-1] / "model.safetensors"))
    states = torch.load(found[-1] / "optimizers.pt", weights_only=True)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    position = Position(**json.loads((found[-1] / "position.json").read_text(encoding="utf-8")))
    logger.info("resuming from %s at %.2fM tokens", found[-1].name, position.tokens / 1e6)
    return position


def save_newest(config: PretrainConfig, folder: Path) -> Path:
    """The newest checkpoint of the run (or the untrained model, before there is one) as a Hugging Face folder."""
    run = config.storage / config.name
    real = read_real_text(config.real_text if config.world.mixture.get("real", 0) > 0 else None)
    tokenizer = prepare_tokenizer(config, run, real)
    network = build_network(config, tokenizer)
    resume(run, network, make_optimizers(config, network))
    save_network(config, network, tokenizer, folder)
    return folder


def save_network(config: PretrainConfig, network: Network, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder of the model; with AAR its routers' adapter in `adapter`, for load_adapter."""
    network.write_routers()
    save_folder(network.model, tokenizer, config.world, folder)
    if network.handle is not None:
        saved, _ = load_model(str(folder))
        handle = attach_aar(saved, network.handle.config)
        with torch.no_grad():
            for (_, ours), (_, theirs) in zip(handle.trainable(), network.handle.trainable(), strict=True):
                ours.copy_(theirs)
        save_adapter(handle, folder / "adapter", metadata={"seed": config.seed, "train": "all"}, overwrite=True)
