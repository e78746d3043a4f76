"""Models in forms that other programs write."""

import json

from safetensors.numpy import save_file

from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME


def write_adapter(folder, tensors, **config):
    """Write a LoRA adapter as PEFT does, by default with the ranks of its factors."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {name.rpartition(".lora_")[0]: len(v) for name, v in tensors.items() if "_A." in name}
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    if config.keys().isdisjoint(("r", "rank_pattern")):
        given["rank_pattern"] = ranks
    (folder / CONFIG_NAME).write_text(json.dumps(given))
    named = {f"base_model.model.{name}": value for name, value in tensors.items()}
    save_file(named, folder / WEIGHTS_NAME)
    return folder


def write_gguf(path, tensors, architecture="other", metadata=(), **settings):
    """Write a GGUF file with the gguf package; a tensor is an array, or raw bytes and a type."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture, **settings)
    for key, value in dict(metadata).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
