"""The linear kernel that measures: for each shape of weight, the fastest of several products.

No official counterpart: on a GPU `F.linear` is fast for every shape, and it is what runs there.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from minisgl.kernel.linear import LinearKernel
from minisgl.kernel.native_linear import native

Product = Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]


def swapped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`weight @ x.t()`, turned back: the large matrix stands on the left and is read as it lies."""
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


BLOCKS = 8  # more than most laptops have cores


def blocks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`swapped` in blocks of rows of `weight`, as a batch of products, for the threads to share."""
    count = math.gcd(BLOCKS, len(weight))
    parts = weight.view(count, -1, weight.shape[1])
    y = torch.bmm(parts, x.t().expand(count, -1, -1)).view(len(weight), -1).t().contiguous()
    return y if bias is None else y.add_(bias)


WIDE_ROWS = 1024  # rows of a weight that are widened at a time: they stay in the cache


def widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product in float32, the weight widened piece by piece; for processors without bfloat16.

    Only one piece is ever held in float32. The result is in the dtype of `x`.
    """
    columns = x.float().t()
    y = torch.empty(weight.shape[0], x.shape[0])
    piece = torch.empty(min(WIDE_ROWS, len(weight)), weight.shape[1])
    for start in range(0, len(weight), WIDE_ROWS):
        rows = weight[start : start + WIDE_ROWS]
        torch.mm(piece[: len(rows)].copy_(rows), columns, out=y[start : start + len(rows)])
    y = y.t() if bias is None else y.t() + bias.float()
    return y.to(x.dtype, memory_format=torch.contiguous_format)


def onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product: of a packed weight, or of one as it lies."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack_onednn(weight: torch.Tensor) -> torch.Tensor:
    """`weight` in the blocks in which oneDNN reads it, for some 16 rows of input."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, 16)


def unpack_onednn(packed: torch.Tensor) -> torch.Tensor:
    return packed.to_dense()


def fbgemm(x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """FBGEMM's product in float32 with a weight that was packed as float16."""
    y = torch.ops.quantized.linear_dynamic_fp16(x.float(), packed)
    return (y if bias is None else y.add_(bias.float())).to(x.dtype)


FLOAT16_MAX = 65504.0


def pack_fbgemm(weight: torch.Tensor) -> Any:
    """A bfloat16 weight as float16, in FBGEMM's blocks.

    float16 has more digits than bfloat16 and less range: what is smaller than 2**-14 loses digits
    (an error of at most 2**-25), and what is larger than 65504 is refused.
    """
    if weight.abs().max() > FLOAT16_MAX:
        raise RuntimeError("a weight that float16 cannot hold")
    return torch.ops.quantized.linear_prepack_fp16(weight.float(), None)


def unpack_fbgemm(packed: Any) -> torch.Tensor:
    return torch.ops.quantized.linear_unpack_fp16(packed)[0]


class Form(NamedTuple):
    """A way to store a weight, and the products that can read it."""

    name: str
    products: tuple[Product, ...]
    pack: Callable[[torch.Tensor], Any] | None = None  # None: as it lies
    unpack: Callable[[Any], torch.Tensor] | None = None


def as_is(dtype: torch.dtype) -> Form:
    """The weight as it was loaded: `[out, in]`, row after row."""
    products: tuple[Product, ...] = (native, F.linear, swapped, blocks, onednn)
    return Form("as loaded", products if dtype == torch.float32 else (*products, widened))


def packed_forms(dtype: torch.dtype) -> list[Form]:
    """The forms that a weight of this dtype may be packed into."""
    forms = [Form("oneDNN", (onednn,), pack_onednn, unpack_onednn)]
    if dtype == torch.bfloat16:
        forms.append(Form("FBGEMM", (fbgemm,), pack_fbgemm, unpack_fbgemm))
    return forms


@cache
def works(product: Product, form: Form, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has the private operators, on this processor, and they compute right."""
    weight, x = torch.eye(16, dtype=dtype), torch.arange(128.0).view(8, 16).to(dtype)
    try:
        y = product(x, weight if form.pack is None else form.pack(weight), None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return y.dtype == dtype and torch.equal(y, x)


class PackedWeight(torch.Tensor):
    """A weight that is kept only in a packed form; as a tensor it has the shape it had.

    `LinearKernel.apply` multiplies by it. Any other operation works on an unpacked copy.
    """

    plan: Plan
    packed: Any

    @staticmethod
    def of(weight: torch.Tensor, plan: Plan) -> PackedWeight:
        """`weight` packed as `plan` says, in an object that doesn't hold on to `weight`."""
        assert plan.form.pack is not None
        new: PackedWeight = torch.Tensor._make_wrapper_subclass(
            PackedWeight, weight.shape, dtype=weight.dtype, device=weight.device
        )
        new.plan, new.packed = plan, plan.form.pack(weight)
        return new

    def unpacked(self) -> torch.Tensor:
        """The numbers as `[out, in]`, a copy."""
        assert self.plan.form.unpack is not None
        return self.plan.form.unpack(self.packed).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.unpacked() if isinstance(value, PackedWeight) else value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


ROWS = (1, 4, 16, 128)  # numbers of rows that are tried: three decodes, and a prefill
PART_BYTES = 8 << 20  # of a larger weight only parts are tried
SAMPLE_BYTES = 48 << 20  # all weights that are tried in turn: more than most caches hold
LONG = 2e-3  # seconds: a run of so long is not repeated


def samples(weight: torch.Tensor) -> list[torch.Tensor]:
    """Weights like `weight`, or parts of it: enough that none is still in a cache at its turn."""
    rows = max(1, PART_BYTES // (weight.shape[1] * weight.element_size()))
    if len(weight) >= 3 * rows:
        return [part for part in weight.split(rows) if len(part) == rows]
    count = max(3, min(64, SAMPLE_BYTES // weight.nbytes))
    return list(weight.repeat(count, 1, 1))  # one block of memory, which is given back whole


def time_product(product: Product, x: torch.Tensor, weights: Iterator[Any], best: float) -> float:
    """The shortest of three runs, in seconds. A run is one product with the next of `weights`.

    `best` is the time to beat. A run before the three doesn't count, as it also prepares the
    product for these shapes; but if it is hopeless (more than 10 times `best`), its time is the
    answer. A later run of more than 2 times `best` is the last, for the product is no match, and
    so is one of more than LONG: what disturbs a run counts less, the longer it is.
    """
    seconds = float("inf")
    for i in range(4):
        weight = next(weights)
        start = time.perf_counter()
        product(x, weight, None)
        last = time.perf_counter() - start
        seconds = min(seconds, last) if i else seconds
        if last > (2 if i else 10) * best or (i > 0 and last > LONG):
            return min(seconds, last)
    return seconds


class Plan(NamedTuple):
    """What was decided for one shape of weight: how to keep it, and which product to use when."""

    form: Form
    products: tuple[Product, ...]  # for each entry of ROWS, and for more rows
    seconds: tuple[float, ...]  # what they took with as many rows as ROWS says

    def product(self, rows: int) -> Product:
        """The product for this many rows: that of the next larger number tried, or the last."""
        return self.products[bisect_left(ROWS, rows)]


MUST_GAIN = 0.93  # what comes later has to take at most so much of the time, or is not chosen
CLEAR_GAIN = 0.7  # the same where there is `native`, and for more rows than were tried


def needed_gain(products: Sequence[Product]) -> float:
    """What share of the time something else may take at most to be chosen."""
    return CLEAR_GAIN if native in products else MUST_GAIN


def fastest(timed: Sequence[tuple[float, Product]], gain: float) -> tuple[float, Product]:
    """The first of `timed`, unless a later one takes less than `gain` of its time, and so on."""
    best = timed[0]
    for seconds, product in timed[1:]:
        if seconds < gain * best[0]:
            best = (seconds, product)
    return best


def measure(form: Form, weights: Sequence[torch.Tensor]) -> Plan | None:
    """The fastest product of one form for each number of rows; None if it cannot be had here.

    The last, for still more rows, is never `native`, and was faster by CLEAR_GAIN with the most.
    """
    dtype = weights[0].dtype
    products = [product for product in form.products if works(product, form, dtype)]
    if not products:
        return None
    try:
        stored = cycle(weights if form.pack is None else [form.pack(w) for w in weights])
    except RuntimeError:
        return None
    chosen: list[tuple[float, Product]] = []
    for rows in ROWS:
        x = torch.ones(rows, weights[0].shape[1], dtype=dtype)
        timed: list[tuple[float, Product]] = []
        for product in products:
            best = min((seconds for seconds, _ in timed), default=float("inf"))
            timed.append((time_product(product, x, stored, best), product))
        chosen.append(fastest(timed, needed_gain(products)))
    for_more = fastest([t for t in timed if t[1] is not native], CLEAR_GAIN)[1]
    return Plan(form, (*(p for _, p in chosen), for_more), tuple(s for s, _ in chosen))


def decide(plans: Sequence[Plan]) -> Plan:
    """The plan with the smallest times, each number of rows counting alike; `plans[0]` is as is."""
    least = [min(times) for times in zip(*(plan.seconds for plan in plans), strict=True)]
    gain = needed_gain(plans[0].products)

    def cost(plan: Plan) -> float:
        ratios = [mine / best for mine, best in zip(plan.seconds, least, strict=True)]
        return sum(ratios) if plan.form.pack is None else sum(ratios) / gain

    return min(plans, key=cost)


MEASURED_DTYPES = (torch.float32, torch.bfloat16)
SMALL = 1 << 16  # a weight of fewer numbers is left to `F.linear`: it isn't worth measuring


class AutoLinear(LinearKernel):
    """Measures once for each shape of weight, when the first such weight is loaded."""

    def __init__(self) -> None:
        self.as_loaded: dict[tuple[torch.Size, torch.dtype], Plan] = {}
        self.best: dict[tuple[torch.Size, torch.dtype], Plan] = {}

    def prepare(self, weight: torch.Tensor, *, shared: bool = False) -> torch.Tensor:
        known, dtype = self.as_loaded if shared else self.best, weight.dtype
        if not weight.is_cpu or dtype not in MEASURED_DTYPES or weight.numel() < SMALL:
            return weight
        key = (weight.shape, dtype)
        if key not in known:
            forms = [as_is(dtype), *([] if shared else packed_forms(dtype))]
            plans = [plan for f in forms if (plan := measure(f, samples(weight))) is not None]
            known[key] = decide(plans)
            self.as_loaded.setdefault(key, plans[0])
        try:
            return weight if known[key].form.pack is None else PackedWeight.of(weight, known[key])
        except RuntimeError:  # this one does not fit the form that its shape got
            return weight

    def apply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            return weight.plan.product(x.shape[0])(x, weight.packed, bias)
        plan = self.as_loaded.get((weight.shape, weight.dtype))
        if plan is None or not weight.is_cpu:
            return F.linear(x, weight, bias)
        return plan.product(x.shape[0])(x, weight, bias)


@cache
def create_linear_kernel() -> LinearKernel:
    """The one kernel of this process, so that all layers and engines share what was measured."""
    return AutoLinear()
