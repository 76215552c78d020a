# ruff: noqa: F821
def check_full_request_is_refused():
    """complete_one refuses a request that has all its tokens, and leaves it as it was"""
    for n in (0, 1, 3):
        req = new_req(3, 0, n)
        for _ in range(n):
            req.complete_one()
        before = state(req)
        refused = raises(RuntimeError, req.complete_one)
        assert refused, f"complete_one went past max_device_len {req.max_device_len}: {req}"
        assert state(req) == before, f"a refused complete_one must change nothing, {req}"


def check_prompt_is_left_alone():
    """append_host leaves the caller's prompt alone: another request may have the same"""
    prompt = torch.arange(3, dtype=torch.int32)
    one, other = (Req(prompt, i, 0, 2, i, SamplingParams(), None) for i in range(2))
    one.complete_one()
    one.append_host(torch.tensor([9]))
    assert prompt.tolist() == [0, 1, 2], f"the caller's prompt became {prompt.tolist()}"
    assert other.input_ids.tolist() == [0, 1, 2], (
        f"the other request has {other.input_ids.tolist()}"
    )


def check_greedy():
    """greedy: temperature 0 or less, or top_k 1; never with a top_p below 1"""
    for wish, expected in [
        ({}, True),
        ({"temperature": -1.0}, True),
        ({"temperature": 0.8}, False),
        ({"temperature": 0.8, "top_k": 1}, True),
        ({"temperature": 0.8, "top_k": 2}, False),
        ({"top_p": 0.9}, False),
        ({"top_k": 1, "top_p": 0.9}, False),
    ]:
        got = SamplingParams(**wish).is_greedy
        assert got is expected, f"is_greedy of {wish} should be {expected}, got {got}"
