"""Netra: an LLM engine that lives inside NVIDIA Triton Inference Server as a Python backend."""
