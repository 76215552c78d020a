"""The sampler: exact distributions, exact greedy rows, and the edges that break samplers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl.core import Batch, Req, SamplingParams
from minisgl.engine import sample as sample_module
from minisgl.engine.sample import (
    BatchSamplingArgs,
    Sampler,
    draw_index,
    keep_mask,
    sample_impl,
    sample_torch,
    softmax_with_temperature,
)

CPU = torch.device("cpu")
DRAWS = 20_000


def batch_of(*params: SamplingParams) -> Batch:
    reqs = [
        Req(torch.tensor([1, 2], dtype=torch.int32), row, 0, 4, row, p, None)  # type: ignore[arg-type]
        for row, p in enumerate(params)
    ]
    return Batch(reqs, "decode")


def run(logits: torch.Tensor, *params: SamplingParams) -> list[int]:
    sampler = Sampler(CPU, logits.shape[-1])
    return sampler.sample(logits, sampler.prepare(batch_of(*params))).tolist()


def exact(logits: torch.Tensor, t: float, k: int = -1, p: float = 1.0) -> torch.Tensor:
    """The distribution by definition, one token at a time, in float64. No ties in `logits`."""
    probs = torch.softmax(logits.double() / t, dim=-1)
    order = probs.argsort(descending=True).tolist()
    order = order[:k] if k >= 1 else order
    mass = sum(probs[i].item() for i in order)
    kept, before = [], 0.0
    for i in order:
        if before / mass < p or not kept:
            kept.append(i)
        before += probs[i].item()
    out = torch.zeros_like(probs)
    out[kept] = probs[kept]
    return out / out.sum()


def within_3_sigma(drawn: torch.Tensor, expected: torch.Tensor) -> None:
    n = len(drawn)
    counts = drawn.bincount(minlength=len(expected)).double()
    sigma = (n * expected * (1 - expected)).sqrt()
    off = (counts - n * expected).abs()
    assert (off <= 3 * sigma + 1e-9).all(), (counts, n * expected, off / sigma)
    assert counts[expected == 0].sum() == 0


LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.0, 1.0, -0.4, 0.7])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.75),
    ],
    ids=str,
)
def test_frequencies(params: SamplingParams) -> None:
    torch.manual_seed(7)
    sampler = Sampler(CPU, len(LOGITS))
    args = sampler.prepare(batch_of(params))
    rows = BatchSamplingArgs(*(a if a is None else a.expand(DRAWS) for a in vars(args).values()))
    drawn = sampler.sample(LOGITS.expand(DRAWS, -1), rows)
    within_3_sigma(drawn, exact(LOGITS, params.temperature, params.top_k, params.top_p))


def test_frequencies_in_a_mixed_batch() -> None:
    torch.manual_seed(11)
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=4),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.9),
    ]
    logits = torch.stack([LOGITS.roll(i) for i in range(len(params))])
    sampler = Sampler(CPU, len(LOGITS))
    args = sampler.prepare(batch_of(*params))
    drawn = torch.stack([sampler.sample(logits, args) for _ in range(DRAWS)])
    for row, p in enumerate(params):
        if p.is_greedy:
            assert drawn[:, row].unique().tolist() == [logits[row].argmax().item()]
        else:
            within_3_sigma(drawn[:, row], exact(logits[row], p.temperature, p.top_k, p.top_p))


def test_the_chapters_example() -> None:
    logits = torch.tensor([5.0, 4, 3, 0, 0, 0])
    torch.manual_seed(0)
    drawn = sample_torch(logits.expand(DRAWS, -1), torch.ones(DRAWS), 2, None)
    share = (drawn == 0).float().mean().item()
    assert abs(share - 0.7311) < 3 * (0.7311 * 0.2689 / DRAWS) ** 0.5
    assert drawn.max() == 1
    assert sample_torch(logits.expand(100, -1), torch.ones(100), None, 0.5).unique().tolist() == [0]


@pytest.mark.parametrize("p, kept", [(0.8, 3), (0.7, 2), (1.0, 4), (0.4, 1), (0.41, 2), (0.9, 3)])
def test_nucleus_keeps_the_token_that_crosses(p: float, kept: int) -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    for row in (probs, softmax_with_temperature(probs.log(), torch.ones(1))):
        assert keep_mask(row, None, torch.tensor([p])).sum() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 1e-8, 1e-3])
def test_tiny_top_p_is_argmax(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    logits = torch.randn(16, 4096).mul(4).to(dtype)
    params = [SamplingParams(temperature=1.0, top_p=p)] * 16
    logits[torch.arange(16), torch.arange(16) * 7] = 30.0  # the likeliest holds far more than 1e-3
    assert run(logits, *params) == logits.argmax(-1).tolist()
    direct = sample_torch(logits, torch.ones(16), None, torch.full((16,), p))
    assert direct.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("t", [0.0, 1e-38, 1e-10, 1e-5, 1e-4])
def test_tiny_temperature_is_argmax(t: float, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    logits = (torch.rand(8, 1000) * 60 - 30).to(dtype)
    logits[:, 400] = logits[:, 20] = logits[:, 999] = 30.0  # equal: the lowest id wins
    tiny = SamplingParams(temperature=t)
    for others in ([tiny] * 7, [SamplingParams(temperature=1.0, top_k=9, top_p=0.5)] * 7):
        for _ in range(5):
            assert run(logits, tiny, *others)[0] == 20


def test_raw_sampling_never_makes_nan() -> None:
    logits = torch.tensor([[30.0, -30.0, 30.0, 29.9]])
    for t in (1e-38, 1e-10, 1e-3, 1.0, 1e4, 1e38):
        probs = softmax_with_temperature(logits, torch.tensor([t]))
        assert torch.isfinite(probs).all() and abs(probs.sum().item() - 1) < 1e-6


@pytest.mark.parametrize("k", [-1, 0, 1, 96, 97, 98, 10**6])
def test_top_k_at_its_edges(k: int) -> None:
    torch.manual_seed(9)
    logits = torch.randn(4, 97)
    p = SamplingParams(temperature=1.0, top_k=k)
    for mates in ([p] * 3, [SamplingParams(temperature=1.0, top_k=5), SamplingParams()] + [p]):
        tokens = run(logits, p, *mates)
        assert all(0 <= token < 97 for token in tokens)
        if k == 1:
            assert tokens[0] == logits[0].argmax()
    everything = keep_mask(torch.full((1, 97), 1 / 97), torch.tensor([k]), None)
    assert everything.sum() == (97 if k < 1 else min(k, 97))


def test_an_odd_vocabulary() -> None:
    logits = torch.randn(2, 40001)
    p = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)
    assert all(0 <= token < 40001 for token in run(logits, p, p))


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    torch.manual_seed(1)
    drawn = sample_torch(torch.zeros(2000, 50), torch.ones(2000), 3, None)
    assert drawn.unique().tolist() == [0, 1, 2]


def test_greedy_rows_do_not_depend_on_their_mates() -> None:
    torch.manual_seed(2)
    logits = torch.randn(6, 300).bfloat16()  # bfloat16 makes ties likely
    logits[0, 17] = logits[0, 250] = logits[0].max() + 1
    alone = logits.argmax(-1).tolist()
    assert alone[0] == 17
    greedy = [SamplingParams(), SamplingParams(temperature=0.9, top_k=1), SamplingParams(top_p=0.3)]
    for mate in (
        SamplingParams(),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_k=20, top_p=0.5),
    ):
        for _ in range(20):
            assert run(logits, *greedy, mate, mate, mate)[:3] == alone[:3]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(1.0, top_k=3, top_p=0.5)],
    ids=str,
)
def test_logits_are_left_alone(params: SamplingParams) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(3, 64).to(dtype)
        before = logits.clone()
        run(logits, params, SamplingParams(), params)
        assert torch.equal(logits, before)


def test_prepare_builds_only_what_is_asked_for() -> None:
    sampler = Sampler(CPU, 100)
    hot = SamplingParams(temperature=0.5)

    def prepared(*params: SamplingParams) -> BatchSamplingArgs:
        return sampler.prepare(batch_of(*params))

    assert prepared(SamplingParams(), SamplingParams(1.0, top_k=1)).temperatures is None
    mixed = prepared(hot, SamplingParams())
    assert mixed.temperatures is not None
    assert mixed.temperatures.tolist() == pytest.approx([0.5, 1e-6])
    assert mixed.top_k is None and mixed.top_p is None
    k = prepared(hot, SamplingParams(0.5, top_k=7))
    assert k.top_k is not None and k.top_k.tolist() == [100, 7] and k.top_p is None
    p = prepared(hot, SamplingParams(0.5, top_p=0.25))
    assert p.top_p is not None and p.top_p.tolist() == [1.0, 0.25] and p.top_k is None
    assert prepared(SamplingParams(top_p=0.5)).temperatures is not None  # the sampling path, at T=0


def test_draw_gives_no_place_to_zero_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0]])
    places: list[tuple[float, int]] = [(0.0, 1), (0.6666, 1), (0.6667, 3), (1 - 2**-53, 3)]
    for u, expected in places:
        uniform: Callable = lambda like, u=u: torch.full_like(like, u)  # noqa: E731
        monkeypatch.setattr(torch, "rand_like", uniform)
        assert draw_index(weights).item() == expected


def test_a_seed_fixes_the_draws() -> None:
    logits = torch.randn(4, 500)
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 4
    torch.manual_seed(21)
    first = [run(logits, *params) for _ in range(5)]
    torch.manual_seed(21)
    assert [run(logits, *params) for _ in range(5)] == first
    assert [run(logits, *params) for _ in range(5)] != first


def test_flashinfer_is_for_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU FlashInfer is not even looked at, installed or not."""
    monkeypatch.setattr(sample_module, "find_spec", lambda name: object())
    token = sample_impl(torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([1e-6]), None, None)
    assert token.tolist() == [1]
