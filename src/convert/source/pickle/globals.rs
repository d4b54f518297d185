//! Callables that pickles of weights use, and their implementations. All others are refused by name.

use super::machine::{Machine, Object, StorageRef, TensorRef, Value};
use super::stream::malformed;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Maximum number of axes; no tensor of a language model has more.
const MAX_AXES: usize = 16;

/// A callable or class that pickles of weights use and that this module implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    /// `_rebuild_tensor(storage, offset, size, stride)`; version 2 adds `requires_grad, hooks[, metadata]`.
    RebuildTensor,
    /// `_rebuild_tensor_v3`: the arguments of version 2 with a dtype before the metadata.
    RebuildTensorV3,
    /// `_rebuild_parameter(tensor, …)`
    RebuildParameter,
    Size,
    Device,
    DType(DType),
    /// A storage class; `None` for untyped bytes.
    Storage(Option<DType>),
}

/// Looks up a callable by name.
///
/// # Errors
/// The callable is not one that weights need.
pub(super) fn find(module: &str, name: &str) -> Result<Global> {
    let refused = || {
        Error::unsupported(format!("the pickle calls `{module}.{name}`, which is not allowed")).help(
            "only plain tensors are read; save the weights alone with `torch.save(model.state_dict(), path)`, or as \
                 safetensors",
        )
    };
    Ok(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::RebuildTensorV3,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => Global::RebuildParameter,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch", "FloatStorage") => Global::Storage(Some(DType::F32)),
        ("torch", "DoubleStorage") => Global::Storage(Some(DType::F64)),
        ("torch", "HalfStorage") => Global::Storage(Some(DType::F16)),
        ("torch", "BFloat16Storage") => Global::Storage(Some(DType::BF16)),
        ("torch", "LongStorage") => Global::Storage(Some(DType::I64)),
        ("torch", "IntStorage") => Global::Storage(Some(DType::I32)),
        ("torch", "ShortStorage") => Global::Storage(Some(DType::I16)),
        ("torch", "CharStorage") => Global::Storage(Some(DType::I8)),
        ("torch", "ByteStorage") => Global::Storage(Some(DType::U8)),
        ("torch", "BoolStorage") => Global::Storage(Some(DType::Bool)),
        ("torch.storage" | "torch", "UntypedStorage") => Global::Storage(None),
        // `torch.float16` and the other dtypes are pickled by name.
        ("torch", dtype) => Global::DType(DType::parse(dtype).map_err(|_| refused())?),
        _ => return Err(refused()),
    })
}

/// Calls `global` with `arguments`.
pub(super) fn call(machine: &mut Machine, global: Global, arguments: &[Value]) -> Result<Value> {
    match (global, arguments) {
        (Global::OrderedDict, []) => machine.add(Object::Dict(Vec::new())),
        (Global::OrderedDict, [pairs]) => ordered_dict(machine, *pairs),
        (Global::RebuildTensor, [storage, offset, size, stride, rest @ ..]) => {
            refuse_metadata(machine, rest.get(2))?;
            tensor(machine, [*storage, *offset, *size, *stride], None)
        }
        (Global::RebuildTensorV3, [storage, offset, size, stride, _, _, dtype, rest @ ..]) => {
            refuse_metadata(machine, rest.first())?;
            let Value::Global(Global::DType(dtype)) = dtype else { return Err(malformed("a tensor without a dtype")) };
            tensor(machine, [*storage, *offset, *size, *stride], Some(*dtype))
        }
        (Global::RebuildParameter, [tensor, ..]) => match machine.object(*tensor) {
            Some(Object::Tensor(_)) => Ok(*tensor),
            _ => Err(malformed("a parameter that is no tensor")),
        },
        (Global::Size, [items]) if machine.items(*items).is_some() => Ok(*items),
        (Global::Device, _) => Ok(Value::Opaque),
        (global, arguments) => Err(malformed(format!("{global:?} called with {} arguments", arguments.len()))),
    }
}

/// Refuses tensors with metadata, which changes the meaning of the numbers, for example to their negatives.
fn refuse_metadata(machine: &Machine, metadata: Option<&Value>) -> Result<()> {
    let empty = |value: &Value| match (*value, machine.object(*value)) {
        (Value::None, _) => true,
        (_, Some(Object::Dict(pairs))) => pairs.is_empty(),
        _ => false,
    };
    if metadata.is_none_or(empty) {
        return Ok(());
    }
    Err(Error::unsupported("found a tensor with metadata, such as a lazy negation, which is not supported")
        .help("save the result of `tensor.resolve_neg().contiguous()`, or convert to safetensors"))
}

/// Makes a dictionary from `OrderedDict([(key, value), …])`, the form that Python 2 writes.
fn ordered_dict(machine: &mut Machine, pairs: Value) -> Result<Value> {
    let pair = |value: &Value| match machine.items(*value) {
        Some([key, value]) => Ok((*key, *value)),
        _ => Err(malformed("an OrderedDict made of something else than pairs")),
    };
    let pairs = machine.items(pairs).ok_or_else(|| malformed("an OrderedDict made of something that is no list"))?;
    machine.budget().charge::<(Value, Value)>(pairs.len())?;
    let pairs = pairs.iter().map(pair).collect::<Result<Vec<_>>>()?;
    machine.add(Object::Dict(pairs))
}

fn tensor(machine: &mut Machine, parts: [Value; 4], dtype: Option<DType>) -> Result<Value> {
    let [storage, offset, size, stride] = parts;
    let (Value::Object(number), Some(Object::Storage(found))) = (storage, machine.object(storage)) else {
        return Err(malformed("a tensor without a storage"));
    };
    let dtype = dtype.or(found.dtype).ok_or_else(|| malformed("a tensor of untyped bytes"))?;
    let numbers = |value: Value, what: &str| -> Result<Vec<u64>> {
        let items = machine.items(value).ok_or_else(|| malformed(format!("a {what} that is no tuple")))?;
        if items.len() > MAX_AXES {
            return Err(Error::unsupported(format!(
                "found a tensor of {} axes, expected at most {MAX_AXES}",
                items.len()
            )));
        }
        items.iter().map(|item| natural(*item, what)).collect()
    };
    let (shape, strides) = (numbers(size, "size")?, numbers(stride, "stride")?);
    if shape.len() != strides.len() {
        return Err(malformed(format!("{} sizes, but {} strides", shape.len(), strides.len())));
    }
    let offset = natural(offset, "storage offset")?;
    machine.add(Object::Tensor(TensorRef { storage: number, dtype, offset, shape, strides }))
}

/// Returns the storage of a persistent id: `("storage", class, key, location, elements[, view])`.
pub(super) fn storage(machine: &Machine, id: Value) -> Result<StorageRef> {
    let no_storage = || malformed("a persistent id that is no storage");
    let Some([kind, class, key, _location, elements, view @ ..]) = machine.items(id) else { return Err(no_storage()) };
    let (Some("storage"), Value::Global(Global::Storage(dtype)), Some(key)) =
        (machine.text(*kind), *class, machine.text(*key))
    else {
        return Err(no_storage());
    };
    let elements = natural(*elements, "storage size")?;
    let (first, visible) = match view {
        [] | [Value::None] => (0, elements),
        [view] => match machine.items(*view) {
            Some([_key, offset, size]) => (natural(*offset, "view offset")?, natural(*size, "view size")?),
            _ => return Err(malformed("a view of a storage without offset and size")),
        },
        _ => return Err(no_storage()),
    };
    if first.checked_add(visible).is_none_or(|end| end > elements) {
        return Err(malformed(format!(
            "a view of {visible} elements from {first} on in a storage of {elements} elements"
        )));
    }
    Ok(StorageRef { key: key.to_string(), dtype, elements, first, visible })
}

fn natural(value: Value, what: &str) -> Result<u64> {
    match value {
        Value::Int(n) if n >= 0 => Ok(n as u64),
        Value::Int(n) => Err(malformed(format!("the {what} is {n}"))),
        _ => Err(malformed(format!("the {what} is no integer"))),
    }
}
