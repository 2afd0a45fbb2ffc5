"""What the server loads for this model; everything is in netra_backend.adapter."""

from netra_backend.adapter import TritonPythonModel

__all__ = ["TritonPythonModel"]
