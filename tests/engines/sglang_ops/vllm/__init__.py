"""For tests only: stands in for the package that SGLang borrows three operations from where it finds no
GPU. See `_custom_ops`."""
