"""Networks of checkpoints in the forms that other programs run: ONNX, safetensors, folders of transformers, torch.export."""

from pipepart.export.exported import FORMATS, Compared, check_request, export_network, wanted_kind
from pipepart.export.model_folder import save_tokenizer
from pipepart.export.network import CannotExport, Network, part_of
from pipepart.export.saved_weights import find_checkpoint, put_weights, read_checkpoint
from pipepart.export.weights_file import read_weights

__all__ = [
    "FORMATS",
    "CannotExport",
    "Compared",
    "Network",
    "check_request",
    "export_network",
    "find_checkpoint",
    "part_of",
    "put_weights",
    "read_checkpoint",
    "read_weights",
    "save_tokenizer",
    "wanted_kind",
]
