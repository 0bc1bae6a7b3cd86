"""The course: its data, its running example, and the commands that run the lessons and report what they measured."""

import logging
import os
import warnings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns when a DataLoader forks

# Libraries of the lessons complain about each other, or about themselves. A reader can do nothing about these messages:
warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm.auto, in a notebook without ipywidgets
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's enums, when transformers imports it
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # CUDA_HOME, when torch.compile runs on a CPU
logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # that a GPU is too small for max-autotune
warnings.filterwarnings("ignore", message=".*(is in beta state|is in prototype stage)", category=UserWarning)  # sparse
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # lesson 04, on a CPU
