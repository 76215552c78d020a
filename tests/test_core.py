"""Edge cases and properties of `minisgl.core` that would clutter chapter 01."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minisgl
from minisgl import core
from minisgl.core import Batch, Context, Req, SamplingParams


def make_req(prompt: int = 6, hit: int = 2, n: int = 3, uid: int = 0, **changes: Any) -> Req:
    """A request over `prompt` made-up tokens; `changes` replace single fields."""
    values: dict[str, Any] = {
        "input_ids": torch.arange(prompt, dtype=torch.int32),
        "table_idx": 0,
        "cached_len": hit,
        "output_len": n,
        "uid": uid,
        "sampling_params": SamplingParams(max_tokens=max(n, 1)),
        "cache_handle": None,
    }
    return Req(**(values | changes))


@st.composite
def requests(draw: st.DrawFn) -> Req:
    """Any request that may exist at admission."""
    prompt = draw(st.integers(1, 300))
    hit = draw(st.integers(0, prompt - 1))
    return make_req(prompt, hit, draw(st.integers(0, 40)))


# --- SamplingParams ---------------------------------------------------------------------------


def test_defaults_are_the_official_ones() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.ignore_eos, p.max_tokens) == (0, -1, 1, False, 1024)
    assert [f.name for f in fields(p)] == [
        "temperature",
        "top_k",
        "top_p",
        "ignore_eos",
        "max_tokens",
    ]
    assert p == SamplingParams(), "settings are compared by value"


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.8}, False),
        ({"temperature": -1.0}, True),
        ({"temperature": 0.8, "top_k": 1}, True),
        ({"temperature": 0.8, "top_k": 0}, False),
        ({"top_k": 50}, True),
        ({"top_p": 0.9}, False),
        ({"top_p": 0.0}, False),
        ({"temperature": 0.8, "top_k": 1, "top_p": 0.9}, False),
        ({"temperature": 1e-38}, False),
    ],
)
def test_is_greedy(params: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**params).is_greedy is greedy


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temperature": math.nan}, "temperature must be a finite number, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
        ({"temperature": -math.inf}, "temperature must be a finite number"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"temperature": None}, "temperature must be a finite number, got None"),
        ({"top_k": -2}, "top_k must be an integer >= -1, got -2: use -1"),
        ({"top_k": 2.5}, "top_k must be an integer >= -1, got 2.5"),
        ({"top_k": None}, "top_k must be an integer"),
        ({"top_p": 1.01}, "top_p must be between 0 and 1, got 1.01"),
        ({"top_p": -0.1}, "top_p must be between 0 and 1, got -0.1"),
        ({"top_p": math.nan}, "top_p must be between 0 and 1, got nan"),
        ({"top_p": "all"}, "top_p must be between 0 and 1, got 'all'"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"max_tokens": -5}, "max_tokens must be an integer >= 1"),
        ({"max_tokens": 1.0}, "max_tokens must be an integer >= 1"),
    ],
)
def test_bad_sampling_params_are_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**params)
    assert says in str(caught.value)


@given(
    temperature=st.floats(-10, 1e6),
    top_k=st.integers(-1, 10**6),
    top_p=st.floats(0, 1),
    max_tokens=st.integers(1, 10**6),
)
def test_every_sensible_setting_is_accepted(
    temperature: float, top_k: int, top_p: float, max_tokens: int
) -> None:
    p = SamplingParams(temperature, top_k, top_p, max_tokens=max_tokens)
    assert p.is_greedy == ((temperature <= 0 or top_k == 1) and top_p == 1)


def test_integers_of_numpy_count_as_integers() -> None:
    assert SamplingParams(top_k=np.int64(5), max_tokens=np.int32(2)).top_k == 5  # type: ignore[arg-type]
    assert make_req(cached_len=np.int64(2)).extend_len == 4


# --- Req ----------------------------------------------------------------------------------------


def test_fields_are_the_official_ones_in_their_order() -> None:
    given_names = [f.name for f in fields(Req) if f.init]
    assert given_names == [
        "input_ids",
        "table_idx",
        "cached_len",
        "output_len",
        "uid",
        "sampling_params",
        "cache_handle",
    ]


@given(requests())
def test_order_of_lengths_holds_to_the_end(req: Req) -> None:
    prompt, n = len(req.input_ids), req.output_len
    passes = 0
    while True:
        assert 0 <= req.cached_len < req.device_len <= req.max_device_len
        assert req.cached_len + req.extend_len + req.remain_len == prompt + n
        assert req.can_decode == (req.remain_len > 0)
        assert req.device_len == prompt + passes, "one more token has a place after each pass"
        if not req.can_decode:
            break
        req.complete_one()
        assert req.extend_len == 1, "after the prefill each pass computes one token"
        passes += 1
    assert passes == n


@given(requests())
def test_each_position_is_computed_once_and_the_last_never(req: Req) -> None:
    hit, total = req.cached_len, req.max_device_len
    computed: list[int] = []
    while req.can_decode:
        computed += range(req.cached_len, req.device_len)
        req.complete_one()
    if req.output_len:
        assert computed == list(range(hit, total - 1))


@given(requests())
def test_a_finished_request_stays_as_it_is(req: Req) -> None:
    while req.can_decode:
        req.complete_one()
    before = (req.cached_len, req.device_len, req.max_device_len)
    with pytest.raises(RuntimeError, match="no room for a token in Req"):
        req.complete_one()
    assert (req.cached_len, req.device_len, req.max_device_len) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"input_ids": [1, 2, 3]}, "1-D int32 tensor on the CPU, got list"),
        ({"input_ids": None}, "got NoneType"),
        ({"input_ids": torch.zeros(1, 6, dtype=torch.int32)}, "got 2-D int32 on cpu"),
        ({"input_ids": torch.tensor(6, dtype=torch.int32)}, "got 0-D int32 on cpu"),
        ({"input_ids": torch.zeros(6, dtype=torch.int64)}, "got 1-D int64 on cpu"),
        ({"input_ids": torch.zeros(6)}, "got 1-D float32 on cpu"),
        ({"input_ids": torch.zeros(6, dtype=torch.int32, device="meta")}, "on meta"),
        ({"input_ids": torch.zeros(0, dtype=torch.int32), "cached_len": 0}, "at least one token"),
        ({"cached_len": -1}, "cached_len must be an integer >= 0, got -1"),
        ({"cached_len": 6}, "cached_len must be < 6"),
        ({"cached_len": 7}, "cached_len must be < 6"),
        ({"cached_len": 2.0}, "cached_len must be an integer >= 0, got 2.0"),
        ({"output_len": -1}, "output_len must be an integer >= 0, got -1"),
        ({"table_idx": -1}, "table_idx must be an integer >= 0, got -1"),
    ],
)
def test_bad_requests_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_req(**changes)
    assert says in str(caught.value)


def test_nothing_to_generate_is_legal_and_never_decodes() -> None:
    req = make_req(6, 2, 0)
    assert (req.extend_len, req.remain_len, req.can_decode) == (4, 0, False)


def test_one_token_prompt_and_one_token_to_generate() -> None:
    req = make_req(1, 0, 1)
    req.complete_one()
    assert (req.cached_len, req.device_len, req.extend_len, req.can_decode) == (1, 2, 1, False)


def test_long_request_of_the_chapter() -> None:
    req = make_req(100, 64, 50)
    seen = [(req.cached_len, req.device_len, req.remain_len)]
    for _ in range(11):
        req.complete_one()
        seen.append((req.cached_len, req.device_len, req.remain_len))
    assert seen[0] == (64, 100, 50)
    assert seen[1] == (100, 101, 49)
    assert seen[11] == (110, 111, 39)


@pytest.mark.parametrize(
    "token",
    [
        torch.tensor([9], dtype=torch.int32),
        torch.tensor(9, dtype=torch.int32),
        torch.tensor([9], dtype=torch.int64),
    ],
)
def test_append_host_keeps_the_dtype(token: torch.Tensor) -> None:
    req = make_req(3, 0, 2)
    prompt = req.input_ids
    req.complete_one()
    req.append_host(token)
    assert req.input_ids.tolist() == [0, 1, 2, 9]
    assert req.input_ids.dtype == torch.int32
    assert prompt.tolist() == [0, 1, 2], "the caller's tensor is left alone"


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (9, "one token id in a tensor on the CPU, got 9: pass next_tokens_cpu[i]"),
        (torch.tensor([1, 2], dtype=torch.int32), "got tensor([1, 2], dtype=torch.int32)"),
        (torch.tensor([], dtype=torch.int32), "got tensor([], dtype=torch.int32)"),
        (torch.tensor([9.0]), "got tensor([9.])"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), "device='meta'"),
    ],
)
def test_append_host_refuses_what_is_no_token(token: Any, says: str) -> None:
    req = make_req()
    req.complete_one()
    with pytest.raises(ValueError) as caught:
        req.append_host(token)
    assert says in str(caught.value)
    assert len(req.input_ids) == 6


def test_append_host_needs_a_completed_pass() -> None:
    token = torch.tensor([9], dtype=torch.int32)
    req = make_req(6, 2, 3)
    with pytest.raises(RuntimeError, match=r"call complete_one\(\) after the pass"):
        req.append_host(token)
    req.complete_one()
    req.append_host(token)
    with pytest.raises(RuntimeError, match="no place for another token"):
        req.append_host(token)
    assert len(req.input_ids) == req.device_len == 7


def test_tokens_may_come_back_a_pass_late() -> None:
    """Overlapped scheduling books the next pass before the last token has reached the CPU."""
    req = make_req(6, 2, 3)
    req.complete_one()
    req.complete_one()
    for token in (7, 8):
        req.append_host(torch.tensor([token], dtype=torch.int32))
    assert req.input_ids.tolist()[6:] == [7, 8]


def test_requests_are_compared_by_identity() -> None:
    a, b = make_req(uid=1), make_req(uid=1)
    assert a != b and a == a
    running = {a, b}
    hash_before = hash(a)
    a.complete_one()
    a.append_host(torch.tensor([9], dtype=torch.int32))
    assert hash(a) == hash_before, "the hash survives progress"
    running.remove(a)
    assert running == {b} and [b, a].index(a) == 1


def test_a_subclass_may_refuse_to_decode() -> None:
    """What the official scheduler does for a prompt that is prefilled in chunks."""

    class Chunk(Req):
        @property
        def can_decode(self) -> bool:
            return False

    chunk = Chunk(torch.zeros(4, dtype=torch.int32), 0, 0, 5, 1, SamplingParams(), None)  # type: ignore[arg-type]
    chunk.complete_one()
    assert (chunk.cached_len, chunk.device_len) == (4, 5)
    assert repr(chunk).startswith("Chunk(uid=1")


def test_reprs_are_short_and_readable() -> None:
    req = make_req(uid=7)
    assert repr(req) == "Req(uid=7, table_idx=0, cached_len=2, device_len=6, max_device_len=9)"
    assert repr(Batch([req], "prefill")) == "Batch(prefill, uids=[7], filled: nothing)"
    batch = Batch([req], "decode")
    batch.positions = torch.tensor([5])
    batch.padded_reqs = [req]
    assert repr(batch) == "Batch(decode, uids=[7], filled: positions, padded_reqs)"
    ctx = Context(4)
    assert repr(ctx) == "Context(page_size=4, filled: nothing, no pass running)"
    with ctx.forward_batch(batch):
        assert "running Batch(decode, uids=[7]" in repr(ctx)


# --- Batch --------------------------------------------------------------------------------------


def test_batch_counts_real_and_padded_requests() -> None:
    a, b, dummy = make_req(uid=1), make_req(uid=2), make_req(1, 0, 1, uid=-1)
    batch = Batch([a, b], "decode")
    batch.padded_reqs = batch.reqs + [dummy] * 2
    assert (batch.size, batch.padded_size) == (2, 4)
    assert batch.is_decode and not batch.is_prefill


def test_batch_allows_one_dummy_many_times() -> None:
    """A CUDA graph of size 8 is made with eight times the same dummy request."""
    assert Batch([make_req(1, 0, 1)] * 8, "decode").size == 8


@pytest.mark.parametrize("phase", ["Prefill", "extend", "", None])
def test_batch_refuses_an_unknown_phase(phase: Any) -> None:
    with pytest.raises(ValueError, match="phase must be 'prefill' or 'decode', got"):
        Batch([make_req()], phase)


def test_batch_refuses_to_be_empty() -> None:
    with pytest.raises(ValueError, match="reqs must be one request or more, got"):
        Batch([], "prefill")


def test_reading_a_field_too_early_is_an_error() -> None:
    batch = Batch([make_req()], "prefill")
    for name in ("input_ids", "positions", "out_loc", "padded_reqs", "attn_metadata"):
        with pytest.raises(AttributeError, match=name):
            getattr(batch, name)
    for name in ("page_table", "attn_backend", "moe_backend", "kv_cache"):
        with pytest.raises(AttributeError, match=name):
            getattr(Context(1), name)


def test_batches_and_contexts_are_compared_by_identity() -> None:
    req = make_req()
    assert Batch([req], "prefill") != Batch([req], "prefill")
    assert len({Context(1), Context(1)}) == 2


# --- Context ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_global_context() -> Iterator[None]:
    core.reset_global_ctx()
    yield
    core.reset_global_ctx()


@pytest.mark.parametrize("page_size", [0, -1, 1.5, None])
def test_page_size_must_be_positive(page_size: Any) -> None:
    with pytest.raises(ValueError, match="page_size must be an integer >= 1"):
        Context(page_size)


class Boom(BaseException):
    """Not an `Exception`, like KeyboardInterrupt."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Boom, GeneratorExit])
def test_context_clears_whatever_ends_the_pass(error: type[BaseException]) -> None:
    ctx, batch = Context(1), Batch([make_req()], "prefill")
    with pytest.raises(error), ctx.forward_batch(batch):
        assert ctx.batch is batch
        raise error
    with pytest.raises(RuntimeError, match="no pass is running"):
        _ = ctx.batch
    with ctx.forward_batch(batch):
        assert ctx.batch is batch


def test_a_refused_inner_pass_leaves_the_outer_one() -> None:
    ctx = Context(1)
    outer, inner = Batch([make_req(uid=1)], "prefill"), Batch([make_req(uid=2)], "prefill")
    with ctx.forward_batch(outer):
        with pytest.raises(RuntimeError, match="a pass is already running"):
            with ctx.forward_batch(inner):
                pytest.fail("the inner pass ran")
        assert ctx.batch is outer


def test_making_the_manager_starts_nothing() -> None:
    ctx, batch = Context(1), Batch([make_req()], "prefill")
    manager = ctx.forward_batch(batch)
    with pytest.raises(RuntimeError, match="no pass is running"):
        _ = ctx.batch
    with manager:
        assert ctx.batch is batch


def test_two_contexts_do_not_see_each_other() -> None:
    one, two, batch = Context(1), Context(1), Batch([make_req()], "prefill")
    with one.forward_batch(batch), two.forward_batch(batch):
        assert one.batch is two.batch is batch


def test_global_context_is_set_once() -> None:
    with pytest.raises(RuntimeError, match="not set"):
        core.get_global_ctx()
    first = Context(1)
    core.set_global_ctx(first)
    for again in (first, Context(1)):
        with pytest.raises(RuntimeError, match="already set"):
            core.set_global_ctx(again)
    assert core.get_global_ctx() is first
    core.reset_global_ctx()
    core.reset_global_ctx()
    core.set_global_ctx(Context(2))
    assert core.get_global_ctx().page_size == 2


# --- The module ---------------------------------------------------------------------------------


def test_importing_core_loads_no_other_module_of_ours() -> None:
    code = (
        "import sys, minisgl.core\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('minisgl', 'transformers')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['minisgl', 'minisgl.core']"


def test_the_package_itself_imports_nothing() -> None:
    code = "import sys, minisgl; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    assert minisgl.__doc__


def test_every_public_name_has_a_docstring() -> None:
    public = [v for v in vars(core).values() if getattr(v, "__module__", "") == core.__name__]
    for value in public:
        assert value.__doc__, f"{value} has no docstring"
        members = vars(value).items() if isinstance(value, type) else ()
        for name, member in members:
            if callable(member) or isinstance(member, property):
                assert name.startswith("_") or member.__doc__, f"{value.__name__}.{name}"


def test_requests_can_be_copied_and_sent() -> None:
    req = make_req(uid=5)
    req.complete_one()
    for other in (copy.copy(req), pickle.loads(pickle.dumps(req))):
        assert repr(other) == repr(req) and other != req
