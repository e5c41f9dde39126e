"""Autograd: the joint graph is partitioned into a forward and a backward; derivatives of our own."""
