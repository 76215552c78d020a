# ruff: noqa: F821
def check_filters():
    """how many tokens top-k and top-p keep of 0.4, 0.3, 0.2, 0.1; no NaN at tiny temperatures"""
    ordered = torch.tensor([[0.4, 0.3, 0.2, 0.1]])

    def kept(k=None, p=None):
        tensors = (None if value is None else torch.tensor([value]) for value in (k, p))
        return keep_mask(ordered, *tensors)[0].int().tolist()

    for k, p, want in [
        (-1, None, [1, 1, 1, 1]),
        (0, None, [1, 1, 1, 1]),
        (2, None, [1, 1, 0, 0]),
        (None, 0.7, [1, 1, 0, 0]),
        (None, 0.8, [1, 1, 1, 0]),
        (2, 0.55, [1, 0, 0, 0]),
    ]:
        got = kept(k, p)
        assert got == want, f"top_k {k} and top_p {p} should keep {want}, got {got}"
    assert kept(p=0.0)[0] == 1, "the likeliest token always stays, also with top_p 0"
    logits = torch.tensor([[300.0, 299.0, 0.0]])
    probs = softmax_with_temperature(logits, torch.tensor([1e-38]))
    assert probs.tolist() == [[1.0, 0.0, 0.0]], f"NaN or not certain at temperature 1e-38: {probs}"


def check_draw_never_hits_zero():
    """an entry of weight zero is never drawn, not even at the very beginning of the line"""
    from unittest.mock import patch

    weights = torch.tensor([[0.0, 2.0, 0.0, 1.0]])
    with patch.object(torch, "rand_like", lambda like: torch.zeros_like(like)):
        got = int(draw_index(weights))
    assert weights[0, got] > 0, f"entry {got} has weight zero and was drawn at the place 0.0"


def check_a_pass_of_the_engine():
    """the page table, max_seq_len and the tokens of a small engine"""
    changes = {"model_path": course.tiny("llama"), "max_running_req": 2, "page_size": 4}
    with started(num_page_override=8, **changes) as hand:
        engine = hand.engine
        rows = engine.page_table.shape[0]
        assert rows == 3, f"2 requests and the dummy need 3 rows, got {rows}"
        first = engine.page_table.unique().tolist()
        assert first == [32], f"every entry should be the dummy's slot, 32, got {first}"
        longest = engine.max_seq_len
        assert longest == 32, f"8 pages of 4 hold 32 tokens, but max_seq_len is {longest}"
        batch = prepare(hand, [admit(hand, [5, 6, 7], 2)], "prefill")
        out = engine.forward_batch(batch, engine.sampler.prepare(batch))
        kinds = out.next_tokens_gpu.dtype, out.next_tokens_cpu.dtype
        assert kinds == (torch.int32, torch.int32), f"tokens should be int32, are {kinds}"
