# ruff: noqa: F821
def check_the_whole_model():
    """logits of a pass over nine tokens equal transformers', for Llama and for Qwen3"""
    from transformers import AutoModelForCausalLM

    for name in ("llama", "qwen3"):
        folder, ids = course.tiny(name), list(range(30, 39))
        cfg = load_config(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            want = theirs(torch.tensor([ids])).logits[0, -1]
            got = forward(ids, load_weights(folder), cfg, new_kv(cfg))
        off = (got - want).abs().max().item()
        assert off < 1e-4, (
            f"{name}: the logits are off by {off:.2g}; look at the norms, the two residuals, what "
            "is rotated before it is cached, and which row is scored"
        )


def check_generate_feeds_each_token_once():
    """the prompt is fed in the first pass, then one token at a time"""
    kv = new_kv(tiny_cfg)
    tokens = list(generate([5, 6, 7], tiny_weights, tiny_cfg, limit=4, kv=kv))
    fed = len(kv[0][0])
    assert fed == 3 + len(tokens) - 1, f"3 + 3 tokens should be fed and cached, {fed} were"
