"""Products of one decode step's rows with dense bf16 matrices, of one rank."""
