"""The lm-eval tasks that are allowed: found before a model is loaded, none that runs generated code, all with their data."""

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.tasks import TaskManager

logger = logging.getLogger("aarlib")


class TaskSource(NamedTuple):
    """Task, group or tag names, and the folders whose YAML files define them."""

    names: tuple[str, ...]
    folders: tuple[str, ...]


def resolve_tasks(names: Sequence[str], include_paths: Sequence[str | Path] = ()) -> TaskSource:
    """Find every task, loading no model; ValueError where one is unknown, runs generated code, or lacks its data.

    lm-eval's own tasks are indexed (half a minute) only where `include_paths` do not hold all the names.
    """
    if not names:
        raise ValueError("evaluate.tasks is empty; name at least one lm-eval task")
    include_path: list[str | Path] = list(include_paths)
    manager = TaskManager(include_defaults=False, include_path=include_path)
    if any(name not in manager.task_index for name in names):
        logger.info("indexing lm-eval's own tasks")
        manager = TaskManager(include_path=include_path)
    leaves = {name: list(_leaves(name, manager.task_index, f"evaluate.tasks: {name!r}")) for name in names}
    for name, entries in leaves.items():
        unsafe = sorted(entry.name for entry in entries if (entry.cfg or {}).get("unsafe_code"))
        if unsafe:
            raise ValueError(
                f"evaluate.tasks: {name!r} runs code that the model wrote, which evaluate never does "
                f"(lm-eval marks {', '.join(unsafe[:3])} unsafe); remove it"
            )
    entries = [entry for found in leaves.values() for entry in found]
    entries += [manager.task_index[name] for name in names]
    folders = sorted({str(Path(entry.yaml_path).parent) for entry in entries if entry.yaml_path})
    source = TaskSource(tuple(names), _outermost(folders))
    _check_data(source)
    return source


def _leaves(name: str, index: Mapping[str, Any], origin: str) -> Iterator[Any]:
    """The tasks below a task, group or tag."""
    if name not in index:
        near = difflib.get_close_matches(name, index, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lm-eval ls tasks` lists them"
        raise ValueError(f"{origin}: no task, group or tag {name!r}; {hint} (further tasks: evaluate.include_path)")
    entry = index[name]
    if entry.kind.name == "TAG":
        children: list[Any] = sorted(entry.tags)
    elif entry.kind.name == "GROUP":
        children = list((entry.cfg or {}).get("task", []))
    else:
        yield entry
        return
    for child in children:
        child_name = child if isinstance(child, str) else child.get("task", child.get("group"))
        if isinstance(child_name, str):
            yield from _leaves(child_name, index, origin)


def _outermost(folders: Sequence[str]) -> tuple[str, ...]:
    """Folders without those that lie inside another one: lm-eval reads a folder with everything below it."""
    paths = [Path(folder) for folder in folders]
    return tuple(str(path) for path in paths if not any(other in path.parents for other in paths))


def _check_data(source: TaskSource) -> None:
    manager = task_manager(source)
    for name in source.names:
        try:
            manager.load([name])
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            raise ValueError(
                f"evaluate.tasks: {name!r} cannot be loaded ({type(error).__name__}: {error}); fetch its data where "
                "there is a network, or give a task with local data_files in evaluate.include_path"
            ) from error


def task_manager(source: TaskSource) -> TaskManager:
    return TaskManager(include_defaults=False, include_path=list(source.folders))
