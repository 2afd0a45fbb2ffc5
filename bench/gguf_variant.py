"""The same model with its weights in another GGUF type, for peers that load GGUF files.

Dequantises every matrix and stores it anew; metadata and vectors stay as they are. So all peers
start from the same weights, up to the rounding of the type.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

_FILE_TYPES = {"F16": 1, "Q8_0": 7}


def write_variant(source: Path, path: Path, weight_type: str) -> None:
    """Write `source` with all matrices in `weight_type` (F16 or Q8_0) to `path`, at once or not."""
    reader = gguf.GGUFReader(source)
    kind = gguf.GGMLQuantizationType[weight_type]
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = _FILE_TYPES[weight_type]
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)
