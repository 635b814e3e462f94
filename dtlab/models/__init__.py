"""Small models and real data to train them on. They know nothing of parallelism."""

from dtlab.models.cnn import CNN
from dtlab.models.digits import Digits, digits
from dtlab.models.gpt import GPT, GPT2_SMALL, GPTConfig
from dtlab.models.mlp import MLP, Parameters
from dtlab.models.shapes import SHAPES, Experts, Latent, Shape, gpt_shape, llama_shape
from dtlab.models.text import text, text_batch

__all__ = ["CNN", "Digits", "Experts", "GPT", "GPT2_SMALL", "GPTConfig", "Latent", "MLP",
           "Parameters", "SHAPES", "Shape", "digits", "gpt_shape", "llama_shape", "text",
           "text_batch"]
