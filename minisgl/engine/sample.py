"""From logits to one token per request: greedy, temperature, top-k, top-p.

Counterpart of the official `engine/sample.py`. The plan is made on the host once per batch
(`Sampler.prepare`), the draw is made on the device (`Sampler.sample`).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from minisgl.utils.device import make_device_tensor

if TYPE_CHECKING:
    from minisgl.core import Batch


def softmax_with_temperature(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probabilities in float32, `[batch, vocab]`, of `logits` / T with a T > 0 for each row.

    The row's largest logit is subtracted *before* the division: with T = 1e-38 that leaves
    0 and minus infinity, where dividing first gives infinity minus infinity, which is not a number.
    """
    shifted = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    return torch.softmax(shifted / temperatures.float().unsqueeze(1), dim=-1)


ROUNDING = 1e-6  # two sums of float32 probabilities closer than this are taken as equal


def keep_mask(
    ordered: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Which entries of `ordered` (`[batch, vocab]`, probabilities in falling order) stay.

    First top-k: the first k places; a k below one keeps all. Then top-p, over the mass that top-k
    left: an entry stays if the mass before it is less than p. Nothing lies before the likeliest
    token, so it always stays (Holtzman et al., "The Curious Case of Neural Text Degeneration").
    """
    vocab = ordered.shape[1]
    rank = torch.arange(vocab, device=ordered.device)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        limit = torch.where(top_k < 1, vocab, top_k)
        keep = rank < limit.unsqueeze(1)
    if top_p is not None:
        left = (ordered * keep).double()
        left = left / left.sum(dim=-1, keepdim=True)
        before = left.cumsum(dim=-1) - left
        p = torch.where(top_p < 1, top_p.double() - ROUNDING, torch.inf)
        keep = keep & ((before < p.unsqueeze(1)) | (rank == 0))
    return keep


def draw_index(weights: torch.Tensor) -> torch.Tensor:
    """One index per row of `weights` (`[batch, n]`, none negative, any sum) with that probability.

    The weights laid end to end make a line; a uniform number is a place on it, and the answer is
    the entry that covers the place. An entry of weight zero covers none. int64 `[batch, 1]`.
    """
    ends = weights.double().cumsum(dim=-1)
    place = torch.rand_like(ends[:, -1:]) * ends[:, -1:]
    drawn = torch.searchsorted(ends, place, right=True)
    return drawn.clamp_(max=weights.shape[1] - 1)  # where a weight is not finite


ARGMAX_TEMPERATURE = 1e-4  # at or below it, a row is answered by argmax


def sample_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor | int | None = None,
    top_p: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Draw one token id per row of `logits` `[batch, vocab]`; int64 `[batch]`. Changes no argument.

    A row with a temperature of at most ARGMAX_TEMPERATURE gets its argmax, the lowest id of equal
    ones: two logits that such a row could tell apart differ by less than their rounding error.
    """
    probs = softmax_with_temperature(logits, temperatures)
    if top_k is None and top_p is None:
        drawn = draw_index(probs)
    else:
        k = None if top_k is None else torch.as_tensor(top_k, device=logits.device).view(-1)
        p = None if top_p is None else torch.as_tensor(top_p, device=logits.device).view(-1)
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        drawn = ids.gather(1, draw_index(ordered * keep_mask(ordered, k, p)))
    return torch.where(temperatures <= ARGMAX_TEMPERATURE, logits.argmax(-1), drawn.squeeze(1))


def sample_flashinfer(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor | int | None,
    top_p: torch.Tensor | float | None,
) -> torch.Tensor:
    """`sample_torch` by FlashInfer's kernels, which need no sorting; CUDA only.

    https://docs.flashinfer.ai/api/sampling.html
    """
    from flashinfer import sampling

    probs = softmax_with_temperature(logits, temperatures).contiguous()
    if top_k is None and top_p is None:
        drawn = sampling.sampling_from_probs(probs)
    elif top_p is None:
        drawn = sampling.top_k_sampling_from_probs(probs, top_k)
    elif top_k is None:
        drawn = sampling.top_p_sampling_from_probs(probs, top_p)
    else:
        drawn = sampling.top_k_top_p_sampling_from_probs(
            probs, top_k, top_p, filter_apply_order="top_k_first"
        )
    return torch.where(temperatures <= ARGMAX_TEMPERATURE, logits.argmax(-1), drawn.long())


def sample_impl(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor | int | None,
    top_p: torch.Tensor | float | None,
) -> torch.Tensor:
    """Draw one token id per row: FlashInfer on a GPU that has it, PyTorch everywhere else."""
    fast = logits.is_cuda and find_spec("flashinfer") is not None
    return (sample_flashinfer if fast else sample_torch)(logits, temperatures, top_k, top_p)


@dataclass
class BatchSamplingArgs:
    """What `sample` needs to know about a batch, one entry per request, on the device.

    `temperatures` is None if all requests are greedy: then argmax is all there is to do.
    `top_k` (int32) and `top_p` (float32) are None unless some request asks for the filter.
    """

    temperatures: torch.Tensor | None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None


GREEDY_TEMPERATURE = 1e-6  # what a greedy request gets when its batch is sampled


@dataclass
class Sampler:
    """Turns the logits of a batch into its next tokens. `vocab_size` is the width of the logits."""

    device: torch.device
    vocab_size: int

    def prepare(self, batch: Batch) -> BatchSamplingArgs:
        """The requests' parameters as tensors, for `batch.reqs` in order.

        A greedy request in a batch with sampled ones gets temperature 1e-6, no top-k and no top-p:
        the draw for its row is certain, and all rows can share one call.
        """
        params = [req.sampling_params for req in batch.reqs]
        if all(p.is_greedy for p in params):
            return BatchSamplingArgs(temperatures=None)
        ts = [
            GREEDY_TEMPERATURE if p.is_greedy else max(p.temperature, GREEDY_TEMPERATURE)
            for p in params
        ]
        ks = [
            p.top_k if 1 <= p.top_k < self.vocab_size and not p.is_greedy else self.vocab_size
            for p in params
        ]
        ps = [1.0 if p.is_greedy else min(max(p.top_p, ROUNDING), 1.0) for p in params]
        return BatchSamplingArgs(
            temperatures=make_device_tensor(ts, torch.float32, self.device),
            top_k=(
                make_device_tensor(ks, torch.int32, self.device)
                if min(ks) < self.vocab_size
                else None
            ),
            top_p=make_device_tensor(ps, torch.float32, self.device) if min(ps) < 1.0 else None,
        )

    def sample(self, logits: torch.Tensor, args: BatchSamplingArgs) -> torch.Tensor:
        """One token id for each row of `logits` `[batch, vocab_size]`; int64 `[batch]`."""
        if args.temperatures is None:
            return logits.argmax(dim=-1)
        return sample_impl(logits, args.temperatures, args.top_k, args.top_p)
