"""What the files of a model call its parameters: where transformers renames them when it loads and saves."""

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from models.errors import ArchError


def head_name_in_files(model: PreTrainedModel, head_name: str) -> str:
    """The name of the head in the files; all other parameters must have the names that they have in the model.

    Args:
        model: transformers' model, on any device.
        head_name: of its head, in the model.

    Raises:
        ArchError: other names differ, or files hold tensors in another form (experts one by one, for example).
    """
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        return head_name
    family, names = model.config.model_type, {}
    if any(type(conversion) is not WeightRenaming for conversion in conversions):
        raise ArchError("model_type", f"the files of {family} hold other tensors than the model has: not implemented")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        (names[name],) = revert_weight_conversion(model, {name: parameter})
    head = f"{head_name}.weight"
    others = [name for name, stored in names.items() if stored != name and name != head]
    if others:
        raise ArchError("model_type", f"the files of {family} say {names[others[0]]} for {others[0]}: not implemented")
    return names[head].removesuffix(".weight")
