"""Turning a dense model of the Llama family into one with block-sparse attention: `tamis retrofit`, `tamis eval`."""
