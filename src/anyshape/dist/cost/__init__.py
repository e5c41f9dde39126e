"""Cost model of many devices: roofline of a layer's operations, alpha-beta of collectives, tables of machines."""
from anyshape.dist.cost.collectives import Group, seconds
from anyshape.dist.cost.layer_cost import LayerCost, layer_cost
from anyshape.dist.cost.machine import Machine, machine_of
from anyshape.dist.cost.workload import Layer, Workload

__all__ = ["Group", "Layer", "LayerCost", "Machine", "Workload", "layer_cost", "machine_of", "seconds"]
