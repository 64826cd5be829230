"""A network as an ONNX file, by torch's exporter, and the same file with weights in fewer bits, for onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipepart.export.narrow_weights import LEAST
from pipepart.export.network import CannotExport, Network, refused

__all__ = ["open_onnx", "write_onnx"]

_MOST = 1_900_000_000
"""Bytes of weights inside of an ONNX file, which is a message of at most 2 GiB; larger ones get a second file."""
_DTYPES = (torch.float32, torch.float64, torch.float16)
_BLOCK = 32
"""Weights of a column that have one scale in 4 bits."""
_NEEDED = 'ONNX needs onnx, onnxscript and onnxruntime: pip install "pipepart[export]"'


def write_onnx(network: Network, target: Path, quantize: str | None) -> None:
    """Write the network, and check the file. Weights of `MatMul` in fewer bits are those of onnxruntime's quantizers."""
    other = {str(p.dtype) for p in network.module.parameters() if p.is_floating_point() and p.dtype not in _DTYPES}
    if other:
        raise CannotExport(
            f"{type(network.module).__name__} has weights in {', '.join(sorted(other))}, which numpy does not have, so the "
            "file could not be compared: build the model in float32 (recipe finetune_hf: model.dtype=float32)"
        )
    large = sum(value.nbytes for value in network.module.state_dict().values()) > _MOST
    if large and quantize:
        raise CannotExport(f"--quantize {quantize} of ONNX is for weights of at most {_MOST:,} bytes; use --to pt2")
    with _quiet():
        try:
            import onnx
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise CannotExport(f"{_NEEDED} ({error})") from error
        program = network.program()
        try:
            torch.onnx.export(
                program, f=str(target), input_names=network.inputs, output_names=network.outputs, dynamo=True,
                external_data=large, verbose=False,
            )  # fmt: skip
        except Exception as error:
            raise refused(network, "torch.onnx.export", error) from error
        if large:
            return
        model = _without_notes(onnx.load(target))
        if quantize is not None:
            model = _quantized(model, target, quantize)
        onnx.checker.check_model(model)
        onnx.save(model, target)


def open_onnx(network: Network, target: Path) -> Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]:
    """The file in onnxruntime on the CPU, as a function of tensors."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # as torch in the comparison
    session = onnxruntime.InferenceSession(str(target), options, providers=["CPUExecutionProvider"])
    known = {given.name for given in session.get_inputs()}  # an input that no output depends on is left out

    def run(values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = {name: value.detach().numpy() for name, value in zip(network.inputs, values) if name in known}
        return tuple(torch.from_numpy(np.asarray(value)) for value in session.run(list(network.outputs), given))

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the exporter and the quantizers say about themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _without_notes(model: Any) -> Any:
    """The model without the names of files and the stacks that the exporter notes at each node."""
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    for node in (*model.graph.node, *(inner for function in model.functions for inner in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""
    return model


def _quantized(model: Any, target: Path, quantize: str) -> Any:
    """The weights of `MatMul` by onnxruntime (int8: computed in whole numbers), all other large ones as int8 with a scale."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    if quantize == "int8":
        import onnx

        onnx.save(model, target)
        # Unsigned: sums of products of signed weights overflow on processors without the instructions for them.
        quantize_dynamic(
            target, target, op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QUInt8
        )
        model = onnx.load(target)
    else:
        changed = ONNXModel(model)
        changed.replace_gemm_with_matmul()
        quantizer = MatMulNBitsQuantizer(changed.model, block_size=_BLOCK, is_symmetric=True)
        quantizer.process()
        model = quantizer.model.model
    _narrow_constants(model)
    return _without_notes(model)


def _narrow_constants(model: Any) -> None:
    """Keep the other large weights as int8, with a `DequantizeLinear` where they are used."""
    import onnx

    graph = model.graph
    kept = []
    for constant in graph.initializer:
        values = onnx.numpy_helper.to_array(constant)
        if values.dtype != np.float32 or values.ndim < 2 or values.size < LEAST:
            kept.append(constant)
            continue
        axis = 1 if any(n.op_type == "ConvTranspose" and constant.name in n.input for n in graph.node) else 0
        others = tuple(number for number in range(values.ndim) if number != axis)
        scale = np.maximum(np.abs(values).max(axis=others), np.finfo(np.float32).tiny) / np.float32(127)
        shape = [-1 if number == axis else 1 for number in range(values.ndim)]
        codes = np.clip(np.rint(values / scale.reshape(shape)), -127, 127).astype(np.int8)
        names = f"{constant.name}_codes", f"{constant.name}_scale"
        kept += [onnx.numpy_helper.from_array(*pair) for pair in zip((codes, scale.astype(np.float32)), names)]
        graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", names, [constant.name], axis=axis))
    del graph.initializer[:]
    graph.initializer.extend(kept)
