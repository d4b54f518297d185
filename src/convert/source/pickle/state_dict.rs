//! Finds the tensors in the result of a pickle, and checks each against its storage.

use super::machine::{Machine, Object, StorageRef, TensorRef, Value};
use super::stream::malformed;
use crate::convert::source::source_tensor::SourceTensor;
use crate::error::{Context, Error, Result};
use std::collections::HashSet;

/// Keys under which training programs store the weights in a checkpoint that also holds the state of the training.
const WRAPPERS: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// Function that returns the start and length in bytes of a storage in the file.
type Find<'a> = dyn Fn(&StorageRef) -> Result<(u64, u64)> + 'a;

/// Returns the tensors of the state dict in `root`, in file order.
pub(super) fn tensors(machine: &Machine, root: Value, find: &Find<'_>, shard: usize) -> Result<Vec<SourceTensor>> {
    let mut names = HashSet::new();
    let mut found = Vec::new();
    for (key, value) in state_dict(machine, root)? {
        let name = machine.text(*key).ok_or_else(|| {
            Error::unsupported("found a key of the state dict that is not a string")
                .help("save tensors under their names, or convert to safetensors")
        })?;
        let Some(Object::Tensor(tensor)) = machine.object(*value) else {
            return Err(Error::unsupported("found a value of the state dict that is not a tensor")
                .tensor(name)
                .help("save only tensors, or convert to safetensors"));
        };
        if !names.insert(name) {
            return Err(Error::corrupt("found this key twice in the state dict").tensor(name));
        }
        machine.budget().charge::<SourceTensor>(1)?;
        machine.budget().charge::<[usize; 2]>(tensor.shape.len())?;
        found.push(locate(machine, name, tensor, find, shard).tensor(name)?);
    }
    found.sort_by(|a, b| (a.start, &a.name).cmp(&(b.start, &b.name)));
    Ok(found)
}

/// Returns the dictionary of tensors: `root` itself, or its value under one of the [`WRAPPERS`].
fn state_dict<'m>(machine: &'m Machine, root: Value) -> Result<&'m [(Value, Value)]> {
    let no_weights = |found: &str| {
        Error::unsupported(format!("found {found}, expected a state dict: a dictionary from names to tensors"))
            .help("save the weights with `torch.save(model.state_dict(), path)`, or as safetensors")
    };
    let Some(Object::Dict(pairs)) = machine.object(root) else { return Err(no_weights("no dictionary")) };
    let is_tensor = |value: &Value| matches!(machine.object(*value), Some(Object::Tensor(_)));
    if pairs.iter().any(|(_, value)| is_tensor(value)) {
        return Ok(pairs);
    }
    let wrapped = WRAPPERS.iter().find_map(|wrapper| {
        let (_, value) = pairs.iter().find(|(key, _)| machine.text(*key) == Some(wrapper))?;
        match machine.object(*value) {
            Some(Object::Dict(inner)) if inner.iter().any(|(_, value)| is_tensor(value)) => Some(inner.as_slice()),
            _ => None,
        }
    });
    wrapped.ok_or_else(|| no_weights("a dictionary without tensors"))
}

/// Returns a tensor with its position in the file, after checking that its elements lie in its storage.
fn locate(machine: &Machine, name: &str, tensor: &TensorRef, find: &Find<'_>, shard: usize) -> Result<SourceTensor> {
    let Some(Object::Storage(storage)) = machine.object(Value::Object(tensor.storage)) else {
        return Err(malformed("a tensor without a storage"));
    };
    let (start, nbytes) = find(storage)?;
    let size = tensor.dtype.size() as u64;
    let overflow = || {
        let (shape, strides, dtype) = (&tensor.shape, &tensor.strides, tensor.dtype);
        Error::corrupt(format!("found shape {shape:?} with strides {strides:?} of {dtype}, whose size overflows"))
    };
    let elements = tensor.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).ok_or_else(overflow)?;
    let visible = visible_bytes(storage, nbytes)?;
    let first = tensor.offset.checked_mul(size).ok_or_else(overflow)?;
    let span = if elements == 0 { 0 } else { span(tensor).ok_or_else(overflow)? };
    let end = span.checked_mul(size).and_then(|n| n.checked_add(first)).ok_or_else(overflow)?;
    // Repeated elements (strides of zero) are refused, because a small file could describe any
    // amount of data with them.
    if end > visible.end - visible.start || elements > span {
        let found = format!(
            "found shape {:?} with strides {:?} from element {}, which does not fit a storage of {} bytes",
            tensor.shape,
            tensor.strides,
            tensor.offset,
            visible.end - visible.start
        );
        return Err(Error::corrupt(found));
    }
    let fits = |n: u64| usize::try_from(n).map_err(|_| overflow());
    let strided = elements > 0 && !is_contiguous(tensor);
    Ok(SourceTensor {
        name: name.to_string(),
        dtype: tensor.dtype,
        shape: tensor.shape.iter().map(|d| fits(*d)).collect::<Result<_>>()?,
        shard,
        start: start + visible.start + if elements == 0 { 0 } else { first },
        nbytes: fits(elements.checked_mul(size).ok_or_else(overflow)?)?,
        strides: if strided { Some(tensor.strides.iter().map(|s| fits(*s)).collect::<Result<_>>()?) } else { None },
    })
}

/// Returns the byte range within the storage that its tensors may use. `nbytes` is the length of the storage.
fn visible_bytes(storage: &StorageRef, nbytes: u64) -> Result<std::ops::Range<u64>> {
    let size = storage.element_bytes();
    if storage.elements.checked_mul(size) != Some(nbytes) {
        let found = format!("found storage {} of {nbytes} bytes", storage.key);
        return Err(Error::corrupt(format!("{found}, expected {} elements of {size} bytes", storage.elements))
            .help("the file is damaged; get it again"));
    }
    // The view lies within the elements, so these products are at most `nbytes` and cannot overflow.
    Ok(storage.first * size..(storage.first + storage.visible) * size)
}

/// Returns the number of elements of the storage from the first to the last that the tensor uses, which must have
/// elements; `None` if the number overflows.
fn span(tensor: &TensorRef) -> Option<u64> {
    let last = tensor.shape.iter().zip(&tensor.strides);
    last.map(|(n, stride)| (n - 1).checked_mul(*stride)).try_fold(1u64, |sum, n| sum.checked_add(n?))
}

/// Returns true when the elements are stored in row-major order without gaps; strides of axes of
/// length one are ignored.
fn is_contiguous(tensor: &TensorRef) -> bool {
    let mut expected = 1;
    for (n, stride) in tensor.shape.iter().zip(&tensor.strides).rev() {
        if *n != 1 && *stride != expected {
            return false;
        }
        expected *= n;
    }
    true
}
