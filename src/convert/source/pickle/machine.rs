//! Interprets pickles, programs of a stack machine, on plain data.
//!
//! All objects are in one list and refer to each other by index. Cycles are therefore harmless, no function recurses,
//! and a deeply nested object is dropped as a list. Every opcode charges the [`Budget`] for the memory of its result.

use super::globals::{self, Global};
use super::stream::{Budget, Stream, malformed};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::interrupt;
use std::collections::HashMap;

/// First byte of a pickle.
pub(super) const PROTO: u8 = 0x80;
const HIGHEST_PROTOCOL: u8 = 5;

/// A value on the stack: a small value, or the index of an object.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Global(Global),
    Object(usize),
    /// A value that tensors do not depend on, such as a float, bytes or a device.
    Opaque,
}

/// An object that a value may refer to.
#[derive(Debug)]
pub(super) enum Object {
    Text(String),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Storage(StorageRef),
    Tensor(TensorRef),
}

/// A storage as described in a pickle.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StorageRef {
    /// Name of the storage in the container.
    pub(super) key: String,
    /// Element type; `None` for untyped bytes.
    pub(super) dtype: Option<DType>,
    /// Number of elements in the whole storage.
    pub(super) elements: u64,
    /// First element that the tensors of the storage may use. Legacy files contain views of storages.
    pub(super) first: u64,
    /// Number of elements that the tensors may use.
    pub(super) visible: u64,
}

impl StorageRef {
    /// Returns the size of an element in bytes.
    pub(super) fn element_bytes(&self) -> u64 {
        self.dtype.map_or(1, |dtype| dtype.size() as u64)
    }
}

/// A tensor as described in a pickle; its sizes are not yet checked.
#[derive(Debug, Clone)]
pub(super) struct TensorRef {
    pub(super) storage: usize,
    pub(super) dtype: DType,
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    pub(super) strides: Vec<u64>,
}

/// Interpreter of pickles. It keeps the objects of all pickles of a file.
pub(super) struct Machine<'a> {
    budget: &'a Budget,
    objects: Vec<Object>,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(budget: &'a Budget) -> Machine<'a> {
        Machine { budget, objects: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() }
    }

    /// Interprets one pickle up to its STOP opcode; returns the resulting value.
    pub(super) fn load(&mut self, stream: &mut Stream) -> Result<Value> {
        self.stack.clear();
        self.marks.clear();
        self.memo.clear();
        if stream.byte()? != PROTO {
            return Err(malformed("no protocol number at the start"));
        }
        let protocol = stream.byte()?;
        if !(2..=HIGHEST_PROTOCOL).contains(&protocol) {
            return Err(Error::unsupported(format!(
                "found pickle protocol {protocol}, expected 2 to {HIGHEST_PROTOCOL}"
            ))
            .help("save the weights again with `torch.save`, which uses protocol 2 by default"));
        }
        for step in 0u64.. {
            if step.is_multiple_of(4096) {
                interrupt::check()?;
            }
            let opcode = stream.byte()?;
            if opcode == b'.' {
                break;
            }
            self.budget.charge::<Value>(1)?;
            self.step(opcode, stream)?;
        }
        self.pop()
    }

    /// Returns the object that a value refers to, if any.
    pub(super) fn object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(number) => self.objects.get(number),
            _ => None,
        }
    }

    /// Returns the text that a value refers to, if any.
    pub(super) fn text(&self, value: Value) -> Option<&str> {
        match self.object(value) {
            Some(Object::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns the elements of a tuple or list.
    pub(super) fn items(&self, value: Value) -> Option<&[Value]> {
        match self.object(value) {
            Some(Object::Tuple(items) | Object::List(items)) => Some(items),
            _ => None,
        }
    }

    /// Returns all storages that the pickles refer to.
    pub(super) fn storages(&self) -> impl Iterator<Item = &StorageRef> {
        self.objects.iter().filter_map(|object| match object {
            Object::Storage(storage) => Some(storage),
            _ => None,
        })
    }

    /// Returns the memory budget.
    pub(super) fn budget(&self) -> &Budget {
        self.budget
    }

    /// Adds an object to the list; returns a value that refers to it.
    pub(super) fn add(&mut self, object: Object) -> Result<Value> {
        self.budget.charge::<Object>(1)?;
        match &object {
            Object::Tensor(t) => self.budget.charge::<u64>(t.shape.len() + t.strides.len())?,
            Object::Dict(pairs) => self.budget.charge::<(Value, Value)>(pairs.len())?,
            Object::Tuple(items) | Object::List(items) => self.budget.charge::<Value>(items.len())?,
            Object::Storage(storage) => self.budget.charge::<u8>(storage.key.len())?,
            // The bytes of a text were charged when they were read.
            Object::Text(_) => {}
        }
        self.objects.push(object);
        Ok(Value::Object(self.objects.len() - 1))
    }

    fn step(&mut self, opcode: u8, stream: &mut Stream) -> Result<()> {
        let value = match opcode {
            b'(' => {
                self.marks.push(self.stack.len());
                return Ok(());
            }
            b'0' => return self.pop().map(drop),
            b'1' => return self.pop_mark().map(drop),
            b'2' => self.top()?,
            // FRAME only gives the number of bytes that follow.
            0x95 => return stream.array::<8>().map(drop),
            b'q' => return self.remember(u32::from(stream.byte()?)),
            b'r' => return self.remember(u32::from_le_bytes(stream.array()?)),
            0x94 => return self.remember(self.memo.len() as u32),
            b'h' => self.recall(u32::from(stream.byte()?))?,
            b'j' => self.recall(u32::from_le_bytes(stream.array()?))?,
            b'N' => Value::None,
            0x88 | 0x89 => Value::Bool(opcode == 0x88),
            b'K' => Value::Int(i64::from(stream.byte()?)),
            b'M' => Value::Int(i64::from(u16::from_le_bytes(stream.array()?))),
            b'J' => Value::Int(i64::from(i32::from_le_bytes(stream.array()?))),
            0x8a => {
                let n = stream.byte()?;
                long(&stream.bytes(u64::from(n), self.budget)?)
            }
            b'G' => stream.array::<8>().map(|_| Value::Opaque)?,
            b'U' | b'C' | 0x8c | b'T' | b'B' | b'X' | 0x8d | 0x8e => self.bytes(opcode, stream)?,
            b'}' => self.add(Object::Dict(Vec::new()))?,
            b']' => self.add(Object::List(Vec::new()))?,
            b')' => self.add(Object::Tuple(Vec::new()))?,
            b't' => self.pop_mark().and_then(|items| self.add(Object::Tuple(items)))?,
            0x85..=0x87 => {
                self.pop_many(usize::from(opcode - 0x84)).and_then(|items| self.add(Object::Tuple(items)))?
            }
            b'a' => return self.pop_many(1).and_then(|items| self.extend(items)),
            b'e' => return self.pop_mark().and_then(|items| self.extend(items)),
            b's' => return self.pop_many(2).and_then(|items| self.set_items(items)),
            b'u' => return self.pop_mark().and_then(|items| self.set_items(items)),
            b'c' => Value::Global(globals::find(&stream.line()?, &stream.line()?)?),
            0x93 => {
                let (name, module) = (self.pop()?, self.pop()?);
                let names = self.text(module).zip(self.text(name));
                let (module, name) = names.ok_or_else(|| malformed("a callable without a name"))?;
                Value::Global(globals::find(module, name)?)
            }
            b'R' => self.call()?,
            b'b' => return self.build(),
            b'Q' => {
                let id = self.pop()?;
                self.add(Object::Storage(globals::storage(self, id)?))?
            }
            _ => return Err(unknown(opcode, stream.position() - 1)),
        };
        self.stack.push(value);
        Ok(())
    }

    /// Reads a text or byte string. The string opcodes of Python 2 may hold either.
    fn bytes(&mut self, opcode: u8, stream: &mut Stream) -> Result<Value> {
        let length = match opcode {
            0x8c | b'U' | b'C' => u64::from(stream.byte()?),
            0x8d | 0x8e => u64::from_le_bytes(stream.array()?),
            _ => u64::from(u32::from_le_bytes(stream.array()?)),
        };
        let bytes = stream.bytes(length, self.budget)?;
        match (opcode, String::from_utf8(bytes)) {
            (b'B' | b'C' | 0x8e, _) | (b'T' | b'U', Err(_)) => Ok(Value::Opaque),
            (_, Ok(text)) => self.add(Object::Text(text)),
            (_, Err(_)) => Err(malformed("text that is not UTF-8")),
        }
    }

    fn remember(&mut self, number: u32) -> Result<()> {
        self.budget.charge::<[(u32, Value); 2]>(1)?;
        let top = self.top()?;
        self.memo.insert(number, top);
        Ok(())
    }

    fn recall(&self, number: u32) -> Result<Value> {
        self.memo.get(&number).copied().ok_or_else(|| malformed(format!("no value in memo slot {number}")))
    }

    fn extend(&mut self, items: Vec<Value>) -> Result<()> {
        self.budget.charge::<Value>(items.len())?;
        match self.top_object()? {
            Object::List(list) => list.extend(items),
            _ => return Err(malformed("items for something that is no list")),
        }
        Ok(())
    }

    fn set_items(&mut self, items: Vec<Value>) -> Result<()> {
        self.budget.charge::<Value>(items.len())?;
        if !items.len().is_multiple_of(2) {
            return Err(malformed("a key without a value"));
        }
        match self.top_object()? {
            Object::Dict(pairs) => pairs.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1]))),
            _ => return Err(malformed("keys and values for something that is no dictionary")),
        }
        Ok(())
    }

    /// Discards the attributes of an object. The attributes of a state dict (`_metadata`, version numbers of
    /// modules) are not weights.
    fn build(&mut self) -> Result<()> {
        self.pop()?;
        match self.top_object()? {
            Object::Dict(_) => Ok(()),
            _ => Err(Error::unsupported("found a pickled object with attributes, expected a state dict")
                .help("save only the weights: `torch.save(model.state_dict(), path)`, or as safetensors")),
        }
    }

    fn call(&mut self) -> Result<Value> {
        let (arguments, callable) = (self.pop()?, self.pop()?);
        let Value::Global(global) = callable else { return Err(malformed("a call of something that is no callable")) };
        let Some(Object::Tuple(arguments)) = self.object(arguments) else {
            return Err(malformed("a call without a tuple of arguments"));
        };
        // No supported callable takes more arguments.
        let arguments: Vec<Value> = arguments.iter().copied().take(16).collect();
        globals::call(self, global, &arguments)
    }

    /// Returns the stack position of the innermost mark; values below it must not be popped.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value> {
        Ok(self.pop_many(1)?[0])
    }

    /// Pops `n` values; returns them in the order in which they were pushed.
    fn pop_many(&mut self, n: usize) -> Result<Vec<Value>> {
        let from = self.stack.len().checked_sub(n).filter(|from| *from >= self.floor());
        Ok(self.stack.split_off(from.ok_or_else(|| malformed("a value taken from an empty stack"))?))
    }

    fn pop_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self.marks.pop().ok_or_else(|| malformed("no mark where one is needed"))?;
        Ok(self.stack.split_off(mark))
    }

    fn top(&self) -> Result<Value> {
        self.stack.last().copied().ok_or_else(|| malformed("a value taken from an empty stack"))
    }

    fn top_object(&mut self) -> Result<&mut Object> {
        match self.top()? {
            Value::Object(number) => Ok(&mut self.objects[number]),
            _ => Err(malformed("a change of a value that is no object")),
        }
    }
}

/// Decodes a little-endian integer. An integer too wide for an `i64` cannot be a size, so it becomes opaque.
fn long(bytes: &[u8]) -> Value {
    if bytes.len() > 8 {
        return Value::Opaque;
    }
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut word = [if negative { 0xff } else { 0 }; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    Value::Int(i64::from_le_bytes(word))
}

fn unknown(opcode: u8, at: u64) -> Error {
    Error::unsupported(format!("found pickle opcode 0x{opcode:02x} at byte {at}, which state dicts do not use"))
        .help("save only the weights: `torch.save(model.state_dict(), path)`, or as safetensors")
}
