"""Parallel training: the same model on many ranks, in whole or in parts. Each idea is one file."""

from dtlab.parallel import conversions, pipeline, sequence, tensor, types
from dtlab.parallel.batch_norm import sync_batch_norm
from dtlab.parallel.checkpoint import full_state_dict, load, load_full_state_dict, save
from dtlab.parallel.clip import clip_grad_norm_
from dtlab.parallel.data import DataParallel
from dtlab.parallel.health import check_replicas, watch_finite
from dtlab.parallel.hybrid import Hybrid, hybrid
from dtlab.parallel.large_batch import LAMB, LARS, growing_batch
from dtlab.parallel.memory import MemoryMeter
from dtlab.parallel.memory_checkpoint import MemoryCheckpoint
from dtlab.parallel.mesh import Mesh
from dtlab.parallel.planner import A100, H100, Device, Layout, Plan, plan, predict
from dtlab.parallel.replicas import Replicas
from dtlab.parallel.sampler import BatchSampler
from dtlab.parallel.virtual_compute import charge_compute
from dtlab.parallel.zero import zero

__all__ = ["A100", "BatchSampler", "DataParallel", "Device", "H100", "Hybrid", "LAMB", "LARS",
           "Layout", "MemoryCheckpoint", "MemoryMeter", "Mesh", "Plan", "Replicas",
           "charge_compute", "check_replicas", "clip_grad_norm_",
           "conversions", "full_state_dict", "growing_batch", "hybrid", "load",
           "load_full_state_dict", "pipeline", "plan", "predict", "save", "sequence",
           "sync_batch_norm", "tensor", "types", "watch_finite", "zero"]
