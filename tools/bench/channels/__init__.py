"""Which posts of the executor end under the rules of NCCL."""
