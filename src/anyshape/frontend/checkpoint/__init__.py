"""Checkpoints of train steps in the format of `torch.distributed.checkpoint`."""
