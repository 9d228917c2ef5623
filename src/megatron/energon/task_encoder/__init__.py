"""The user's hooks."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.collate": [
            "batch_list",
            "batch_pad_stack",
            "batch_stack",
            "generic_batch",
        ],
        "energon.samples.crude": [
            "basic_sample_keys",
        ],
        "energon.samples.sample": [
            "Batch",
        ],
        "energon.task_encoder.augment": [
            "AugmentTaskEncoder",
        ],
        "energon.task_encoder.cooker": [
            "Cooker",
            "cooker",
            "stateless",
        ],
        "energon.task_encoder.encoder": [
            "DefaultTaskEncoder",
            "TaskEncoder",
        ],
        "energon.task_encoder.getters": [
            "get_train_dataset",
            "get_val_dataset",
            "get_val_datasets",
        ],
    },
)
