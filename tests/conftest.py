"""Options, Hypothesis profiles and fixtures of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from debris import DebrisGuard
from huge_pages import use_huge_pages
from hypothesis import HealthCheck, settings
from preloaded import Preloaded
from watchdog import Watchdog

if TYPE_CHECKING:
    from ceph import S3
    from fault_proxy import FaultProxy

LONGEST_FILES = (
    *("test_stateful_protocol", "test_verdict", "test_loop_end", "test_memory", "test_pool_end", "test_inheritance"),
    *("test_unseeded", "test_interrupts", "test_resume", "test_mixtures", "test_pool", "test_torch_orders"),
    *("test_deaths", "test_iterable_datasets", "test_torch_exits", "test_ranks"),
    *("test_drop_in", "test_agreement", "test_fork_server", "test_dataset_formats", "test_torch_iterable"),
    *("test_docs", "test_servers", "test_local", "test_vision", "test_demo", "test_decode_samplings"),
    *("test_decode_verdicts", "test_outage", "test_cache", "test_slow_lines", "test_wrappers"),
    *("test_kill_parent", "test_ray"),
    *("test_huggingface_stream", "test_formats_s3", "test_bench", "test_layers", "test_deploy"),
)
"""The files that run first, the longest ones of each part of the suite; `scripts/test_costs.py` measures them."""

TESTS = Path(__file__).parent

FORKING_FOLDERS = {"collate", "conformance", "core", "laws", "loader", "samplers", "stress", "workers"}
"""Folders of the tests that start many processes."""

LARGE_FILES = {
    *("test_batch_reads", "test_libraries", "test_lightning", "test_trainer_ranks", "test_paths", "test_checkpoints"),
    *("test_dataset_fingerprint", "test_dataset_formats", "test_table_formats", "test_table_writers"),
    *("test_remote_arrow", "test_live_kills", "test_sources", "test_compiler"),
}
"""Files of those folders that import large libraries: they run with the other folders."""

LARGE_LIBRARIES = {"lightning", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "sympy", "transformers"}

SETTLED_MODULES = pytest.StashKey[int]()
"""The number of modules whose objects no collection visits."""

gc.disable()  # until `_settle`: each collection would visit the imported objects and the tests so far

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=25,  # of other properties; the laws have `law_settings.CI_EXAMPLES`
    deadline=None,  # the machines of a CI are shared: a slow example proves nothing
    derandomize=True,  # a red run can be repeated
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("night", max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "night" if os.environ.get("NIGHTLY") else "dev")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs in this state, and every process that a test interrupts would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# For Ray: no report to its makers, and no file with a token.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        action="store_true",
        help="run the tests marked `reference`, and only those: torch's own leg of the conformance tests",
    )
    parser.addoption(
        "--part",
        choices=("forking", "others"),
        help="run the tests that start many processes, or all others; small processes fork several times faster",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watchdog(config))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A name for bytes that is the same in every process: compressed data may contain the time."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `reference`, or with `--reference` all others; order the rest."""
    wanted = config.getoption("--reference")
    left_out = [item for item in items if (item.get_closest_marker("reference") is not None) != wanted]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]
    # A long file at the end would keep one core busy while the others are idle.
    turns = {name: turn for turn, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: turns.get(item.path.stem, len(turns)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of the other part, and files without tests marked `alone` if those are selected."""
    part, (folder, *_) = config.getoption("--part"), (*collection_path.parts[len(TESTS.parts) :], "")
    if part == "forking" and folder and folder not in FORKING_FOLDERS:
        return True  # not even its conftest.py
    if collection_path.suffix != ".py":
        return None
    if part is not None and collection_path.stem.startswith("test_"):
        forks = folder in FORKING_FOLDERS and collection_path.stem not in LARGE_FILES
        return True if forks != (part == "forking") else None
    is_sought = config.option.markexpr.startswith("alone")
    return True if is_sought and "mark.alone" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make collections and forks cheap: each would visit 700,000 imported objects, or copy 40,000 page entries."""
    imported = LARGE_LIBRARIES & sys.modules.keys()
    if session.config.getoption("--part") == "forking" and imported:
        raise pytest.UsageError(f"tests of the forking part import {', '.join(imported)}: add to LARGE_FILES")
    _settle(session)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Do the same after a test that has imported a large library: hundreds of tests may follow in this process."""
    if len(sys.modules) > item.session.stash[SETTLED_MODULES] + 200:
        _settle(item.session)


def _settle(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    use_huge_pages()
    session.stash[SETTLED_MODULES] = len(sys.modules)


@pytest.fixture
def no_debris() -> Iterator[DebrisGuard]:
    """Fails the test if it leaves a child process, thread, descriptor or name in /dev/shm; the fork server may stay."""
    guard = DebrisGuard()
    yield guard
    guard.check()


@pytest.fixture(scope="session")
def preloaded_server() -> Iterator[Preloaded]:
    with Preloaded() as server:
        yield server


@pytest.fixture(scope="module")
def preloaded(request: pytest.FixtureRequest, preloaded_server: Preloaded) -> Preloaded:
    """Runs scripts in forks of an interpreter that has imported torch and feedline.

    They end as interpreters do in the folders whose tests start many processes, and elsewhere with all that they have
    imported.
    """
    ends_fully = request.path.parts[len(TESTS.parts)] in FORKING_FOLDERS
    return preloaded_server if ends_fully else preloaded_server.ending_quickly()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A real S3 server, with keys of full access."""
    from ceph import radosgw  # not above: machines with a GPU may lack obstore

    with radosgw(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def faulty_s3(s3: S3) -> Iterator[tuple[S3, FaultProxy]]:
    """The same server behind a proxy, which is harmless until a test requests faults."""
    from ceph import S3
    from fault_proxy import fault_proxy

    with fault_proxy(s3.endpoint) as proxy:
        yield S3(proxy.endpoint(), s3.access_key_id, s3.secret_access_key, s3.config), proxy


@pytest.fixture(scope="session")
def web_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `web` serves."""
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="session")
def web(web_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real web server that answers ranges."""
    from nginx import nginx

    with nginx(tmp_path_factory.mktemp("nginx"), web_root) as address:
        yield address
