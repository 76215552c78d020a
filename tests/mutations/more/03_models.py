# ruff: noqa: F821
def check_layers_are_numbered():
    """layer i attends with the KV of layer i"""
    with torch.device("meta"):
        model = create_model(config_of(course.tiny("llama")))
    got = [layer.self_attn.attn.layer_id for layer in model.model.layers.op_list]
    assert got == list(range(len(got))), f"layer_id should count the layers from 0, got {got}"
