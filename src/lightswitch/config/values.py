"""The words that a key at the top of a config may be set to, where they are few, and the types of values."""

AUTO = "auto"
LARGEST_INTEGER = 2**63 - 1  # torch and NumPy count in 64 bits
LEAST_SECONDS = {"watch.lost_after_seconds": 5}  # a rank may be silent for some seconds, as while it compiles
LEAST_SECONDS_OF_OTHERS, MOST_SECONDS = 1, 2_000_000  # 23 days; sockets and gloo count milliseconds in 32 bits

ALLOWED = {
    "mode": ("fit", "validate", "test", "predict", "plan", "dry_run", "check"),
    "on_nan": ("stop", "skip", "ignore"),
    "matmul_precision": ("highest", "high", "medium"),
}
WORDS = {"micro_batch_size": (AUTO,)}  # beside values of its types
_NULL = type(None)
KINDS: dict[str, tuple[type, ...]] = {  # of keys that every config has
    "name": (str,),
    "run_id": (str, int),
    "seed": (int,),
    "mode": (str,),
    "objective": (str,),
    "resume": (str,),
    "init_from": (str, _NULL),
    "ckpt_path": (str, _NULL),
    "global_batch_size": (int,),
    "micro_batch_size": (int, _NULL),
    "meet_timeout_seconds": (int, float),
}
KINDS_OF_OTHERS: dict[str, tuple[type, ...]] = {  # a config of an older version may lack them
    "compare": (bool,),
    "init_names": (dict, _NULL),
    "tags": (list,),
    "on_nan": (str,),
    "matmul_precision": (str,),
    "lr_scaling.rule": (str,),
    "lr_scaling.reference_batch_size": (int,),
    "watch.lost_after_seconds": (int, float),
    "watch.hung_after_seconds": (int, float),
    "plan.memory_gib": (int, float, _NULL),
    "plan.deepspeed": (bool,),
    "plan.precisions": (str, list, _NULL),
    "plan.disk_gb_per_second": (int, float),
    "plan.tokens_per_sample": (int, _NULL),
    "dry_run.rank": (int, list, _NULL),
    "dry_run.steps": (int,),
    "check.steps": (int,),
    "check.devices": (int,),
    "check.strategies": (str, list, _NULL),
}
