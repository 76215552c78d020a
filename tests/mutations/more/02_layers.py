# ruff: noqa: F821
def check_activations():
    """the activation is on the first half, gate; gelu is the exact one"""
    x = torch.randn(4, 10) * 3
    gate, up = x[:, :5], x[:, 5:]
    assert torch.allclose(silu_and_mul(x), F.silu(gate) * up), (
        "silu belongs on gate, the first half"
    )
    assert torch.allclose(gelu_and_mul(x), F.gelu(gate) * up), "gelu(gate) * up, with exact gelu"


def check_row_parallel_sum():
    """the parts of two ranks add up to the whole product, the bias added once"""

    class TakingTurns(DistributedImpl):
        total = 0.0

        def all_reduce(self, x):
            self.total = self.total + x
            return self.total

        def all_gather(self, x):
            raise AssertionError("nothing has to be gathered here")

    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    DistributedCommunicator.plugins.append(TakingTurns())
    try:
        for rank in range(2):
            mine = slice(4 * rank, 4 * rank + 4)
            with as_rank(rank, 2):
                layer = LinearRowParallel(8, 5, has_bias=True)
                layer.load_state_dict({"weight": weight[:, mine], "bias": bias})
                y = layer.forward(x[:, mine])
    finally:
        DistributedCommunicator.plugins.pop()
    assert torch.allclose(y, F.linear(x, weight, bias), atol=1e-5), "is the bias added once?"
