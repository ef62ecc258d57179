"""The models that tamis knows by name. Nothing heavy is imported here: the command line shows these in its help."""

DENSE_MODEL = "smollm2-135m"
"""SmolLM2-135M-Instruct as it is."""
SPARSE_MODEL = "smollm2-135m-msa"
"""The same with an index branch, which is part of the package."""
SHIPPED_CONFIG = "minimax-m3"
"""A configuration that is part of the package, for planning without any download."""
DEFAULT_MODEL = SPARSE_MODEL
"""What runs where no model is named."""
