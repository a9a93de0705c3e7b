"""Loaders named on the command line as `script.py:name` or `package.module:name`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter
from operator import attrgetter
from pathlib import Path
from time import monotonic
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from feedline.errors import ArgumentError
from feedline.loader.dataloader import DataLoader
from feedline.loader.loop import Iteration

SCRIPT = "feedline_target"
"""Name of the module of a script that cannot have the name of its file."""


class TargetError(ArgumentError):
    """A name on the command line does not lead to a loader."""

    def __init__(self, message: str, remedy: str = "run the script by itself to see where") -> None:
        super().__init__(message)
        self.remedy = remedy
        self.add_note(remedy)


_NAME_ONE = "name a global that is a DataLoader, or a function without arguments that returns one"


_NO_ARGUMENTS = (
    "the command line of a script is empty here: give its options defaults, or make the loader in a function"
)


def load(target: str) -> TorchDataLoader[Any]:
    """The loader that `target` names.

    The name may be an attribute path, and may lead to a function without arguments that returns the loader. Without a
    name, it is the only loader among the globals. Raises `TargetError`, whose cause is the error of the script, if it
    raised one.
    """
    source, _, path = target.partition(":")
    found = _find(source, _globals_of(source), path)
    if not isinstance(found, TorchDataLoader) and callable(found):
        found = _call(found, target)
    if not isinstance(found, TorchDataLoader):
        raise TargetError(f"{target} is of class {type(found).__name__}, not a DataLoader", _NAME_ONE)
    return found


def as_feedline(loader: TorchDataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A feedline loader with the arguments of `loader`, except for `changes`.

    feedline's own arguments are kept if `loader` is feedline's.
    """
    own = {name: getattr(loader._fl, name) for name in _OWN} if isinstance(loader, DataLoader) else {}
    if getattr(loader, "_fl_adapts", False):
        own["num_workers"] = "auto"
    if hasattr(loader, "in_order"):
        own["in_order"] = loader.in_order
    return DataLoader(loader.dataset, **_without_unused({**_arguments(loader, changes), **own, **changes}))


def as_torch(loader: TorchDataLoader[Any], **changes: Any) -> TorchDataLoader[Any]:
    """A loader of torch with the arguments of `loader`, except for `changes`."""
    return TorchDataLoader(loader.dataset, **_without_unused({**_arguments(loader, changes), **changes}))


def _arguments(loader: TorchDataLoader[Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments of torch's constructor that make an equal loader.

    A `batch_size` in `changes` replaces the batch sampler.
    """
    arguments: dict[str, Any] = {name: getattr(loader, name, None) for name in _PLAIN}
    if loader.batch_size is None and loader.batch_sampler is not None and "batch_size" not in changes:
        return {**arguments, "batch_sampler": loader.batch_sampler}
    arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return arguments if isinstance(loader.dataset, IterableDataset) else {**arguments, "sampler": loader.sampler}


def _without_unused(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments; without workers, also without those that need them."""
    if arguments["num_workers"]:
        return arguments
    return {
        **arguments,
        "prefetch_factor": None,
        "persistent_workers": False,
        "multiprocessing_context": None,
        "timeout": 0,
    }


_PLAIN = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip


_OWN = ("seed", "worker_method", "distributed", "on_error", "device", "recovery", "accelerate")


def _globals_of(source: str) -> dict[str, Any]:
    """Globals of an executed script, or of an imported module."""
    script = Path(source)
    if script.suffix != ".py" and not script.is_file():
        return _import(source)
    if not script.is_file():
        raise TargetError(f"there is no file {source}", "give the path of the script from this folder")
    with _like_python(script), _without_training(MOST_TRAINING_S), _module_of(script) as module:
        try:
            loader = module.__loader__
            assert isinstance(loader, SourceFileLoader)
            loader.exec_module(module)
            return vars(module)
        except _TrainingStop as stop:
            return _globals_at(stop, module.__name__, source)
        except SystemExit as end:
            raise TargetError(
                f"{source} ended with {_describe(end)} before it could be examined", _NO_ARGUMENTS
            ) from end
        except Exception as error:
            message = f"{source} raised {_describe(error)} before it could be examined"
            if isinstance(error, ImportError) and "relative import" in str(error):
                name = ".".join(script.with_suffix("").parts)
                raise TargetError(message, f"name it as a module, from the folder of its package: {name}") from error
            if isinstance(error, RuntimeError) and "exited unexpectedly" in message:  # a worker that imports the script
                raise TargetError(message, 'put what reads the loader under if __name__ == "__main__":') from error
            raise TargetError(message) from error


@contextmanager
def _module_of(script: Path) -> Iterator[ModuleType]:
    """A module for a script, which stays known unless the block raises.

    Its name is that of the file, if no other module has it: a process that does not fork from this one can then import
    the classes of the script, as it does those of `__main__` in a run.
    """
    known = sys.modules.get(script.stem)
    is_free = known is None or (known.__spec__ is not None and known.__spec__.loader_state == SCRIPT)
    name = script.stem if is_free and script.suffix == ".py" and "." not in script.stem else SCRIPT
    spec = spec_from_file_location(name, script.resolve(), loader=SourceFileLoader(name, str(script.resolve())))
    assert spec is not None
    spec.loader_state = SCRIPT
    module = sys.modules[name] = module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # nothing is left next to the script
    try:
        yield module
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        sys.dont_write_bytecode = writes


def _import(name: str) -> dict[str, Any]:
    sys.path.insert(0, os.curdir)
    with _without_training(MOST_TRAINING_S):
        try:
            return vars(importlib.import_module(name))
        except _TrainingStop as stop:
            return _globals_at(stop, name, name)
        except (Exception, SystemExit) as error:
            raise TargetError(f"module {name} cannot be imported: {_describe(error)}") from error


MOST_TRAINING_S = 5.0
"""Seconds for which a script may read its loaders before it is stopped. A look at a batch takes less."""


class _TrainingStop(BaseException):
    """Ends a script that trains where it should only define its loader.

    No `Exception`: the script must not handle it.
    """


@contextmanager
def _without_training(most_s: float) -> Iterator[None]:
    """Raise `_TrainingStop` in a block that reads loaders for over `most_s`."""
    first_s: list[float] = []

    def stopping(take: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def take_or_stop(iteration: Any) -> Any:
            if not first_s:
                first_s.append(monotonic())
            if monotonic() > first_s[0] + most_s:
                raise _TrainingStop
            return take(iteration)

        return take_or_stop

    with ExitStack() as patches:
        for kind in (_BaseDataLoaderIter, Iteration):
            patches.enter_context(patch.object(kind, "__next__", stopping(kind.__next__)))
        yield


def _globals_at(stop: _TrainingStop, name: str, source: str) -> dict[str, Any]:
    """Globals of a stopped module; prints the line that was stopped."""
    frame, line = _place_of(stop, name)
    remedy = 'put the loop under if __name__ == "__main__":'
    print(f"{source}:{line} reads a loader when it is imported: stopped there; {remedy}", file=sys.stderr)
    return dict(frame.f_globals)


def _place_of(stop: _TrainingStop, name: str) -> tuple[FrameType, int]:
    """The outermost frame of a module that was stopped, with its line."""
    frames = traceback.walk_tb(stop.__traceback__)
    return next((frame, line) for frame, line in frames if frame.f_globals.get("__name__") == name)


@contextmanager
def _like_python(script: Path) -> Iterator[None]:
    """Set `sys.path` and `sys.argv` as `python script.py` does.

    `sys.path` stays changed, because loaders import later.
    """
    sys.path.insert(0, str(script.resolve().parent))
    arguments, sys.argv = sys.argv, [str(script)]
    try:
        yield
    finally:
        sys.argv = arguments


def _find(source: str, variables: dict[str, Any], path: str) -> Any:
    if path:
        name, _, rest = path.partition(".")
        try:
            return attrgetter(rest)(variables[name]) if rest else variables[name]
        except (KeyError, AttributeError):
            message = f"{source} defines no {path}{_names_of_loaders(variables)}"
            raise TargetError(message, _NAME_ONE) from None
    loaders = {name: value for name, value in variables.items() if isinstance(value, TorchDataLoader)}
    if len(loaders) == 1:
        return next(iter(loaders.values()))
    if not loaders:
        raise TargetError(
            f"{source} has no DataLoader among its globals",
            f"make it in a function without arguments that returns it, and name that, as in {source}:make_loader",
        )
    raise TargetError(f"{source} has several loaders: name one{_names_of_loaders(variables)}", f"{source}:NAME")


def _names_of_loaders(variables: dict[str, Any]) -> str:
    names = [name for name, value in variables.items() if isinstance(value, TorchDataLoader)]
    return f" (loaders there: {', '.join(names)})" if names else ""


def _call(function: Any, target: str) -> Any:
    """The result of a function, which may train for `MOST_TRAINING_S` at most."""
    if missing := _missing_arguments(function):
        raise TargetError(
            f"{target} needs arguments: {', '.join(missing)}",
            "name a method of an object, not of its class"
            if missing == ["self"]
            else "give them defaults, or name a function that calls it with values",
        )
    with _without_training(MOST_TRAINING_S):
        try:
            _set_up(function)
            return function()
        except _TrainingStop as stop:
            frames = traceback.walk_tb(stop.__traceback__)
            line = next(line for frame, line in frames if frame.f_code.co_filename != __file__)
            raise TargetError(f"{target}() reads a loader in line {line}: stopped there", _NAME_ONE) from stop
        except SystemExit as end:
            raise TargetError(f"{target}() ended with {_describe(end)}", _NO_ARGUMENTS) from end
        except Exception as error:
            raise TargetError(f"{target}() raised {_describe(error)}") from error


_STAGES = {
    "train_dataloader": "fit",
    "val_dataloader": "fit",
    "test_dataloader": "test",
    "predict_dataloader": "predict",
}
"""Stages of Lightning in which its modules make loaders."""


def _set_up(function: Any) -> None:
    """Call `setup` of a Lightning module, as its trainer does."""
    setup = getattr(getattr(function, "__self__", None), "setup", None)
    stage = _STAGES.get(getattr(function, "__name__", ""))
    if callable(setup) and stage is not None:
        setup(stage)


def _missing_arguments(function: Any) -> list[str]:
    """Names of the parameters without defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a compiled function
        return []
    needed = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    return [each.name for each in parameters if each.default is Parameter.empty and each.kind in needed]


def loader_error(target: str, error: Exception) -> TargetError:
    """Error that names the failing loader, with the notes of `error`."""
    result = TargetError(f"{target} raised {_describe(error)}", f"feedline doctor {target} reads samples one by one")
    for note in getattr(error, "__notes__", ()):
        if "Traceback (most recent call last)" not in note:  # of a worker
            result.add_note(note)
    return result


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
