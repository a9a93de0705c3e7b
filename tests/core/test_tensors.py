"""Settings that tensors need."""

from __future__ import annotations

import warnings

import pytest

from feedline.core.tensors import expect_torch_load

TEXT = "You are using `torch.load` with `weights_only=False` (the current default value), which uses"


def warn(module: str) -> None:
    warnings.warn_explicit(TEXT, FutureWarning, "a.py", 1, module)


@pytest.mark.parametrize("version", ["2.4.0", "2.5.1+cu124"])
def test_torchs_own_calls_of_torch_load_do_not_warn_and_those_of_users_do(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect_torch_load(version)
        warn("torch.storage")
        with pytest.raises(FutureWarning):
            warn("train")


def test_newer_versions_need_no_filter() -> None:
    with warnings.catch_warnings():
        filters = list(warnings.filters)
        for version in ("2.6.0", "2.13.0+cpu", "3.0.0a0"):
            expect_torch_load(version)
        assert warnings.filters == filters
