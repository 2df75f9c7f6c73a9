"""Hugging Face: models by name or folder as modules, and collators. Needs the extra `huggingface`."""

from trainkit.huggingface.collators import LanguageModel, PadInputs, PadSequences
from trainkit.huggingface.module import HuggingFace

__all__ = ["HuggingFace", "LanguageModel", "PadInputs", "PadSequences"]
