//! Mutates `pytorch_model.bin`: pickles as lists of opcodes, in a zip archive or in sequence as PyTorch before 1.6
//! wrote them.

use super::{Reader, below, edit, edit_text, number, one_in, pick};
use iec::rng::Rng;

const PROTO: u8 = 0x80;
const STOP: u8 = b'.';
const GLOBAL: u8 = b'c';
/// Opcodes without an argument: marks, containers, constants, calls and those that read or discard the stack.
const PLAIN: &[u8] = b"(012N}])taesuRbQ\x88\x89\x85\x86\x87\x93\x94";
/// Opcodes with an argument, except [`GLOBAL`].
const WITH_ARGUMENT: &[u8] = b"KMJGqrhj\x95UCTBX\x8a\x8c\x8d\x8e";
/// Arguments of [`GLOBAL`]: module and name of a callable.
const CALLABLES: &[&str] = &[
    "collections\nOrderedDict\n",
    "torch._utils\n_rebuild_tensor_v2\n",
    "torch._utils\n_rebuild_tensor_v3\n",
    "torch._utils\n_rebuild_parameter\n",
    "torch\nSize\n",
    "torch\ndevice\n",
    "torch\nfloat64\n",
    "torch\nLongStorage\n",
    "torch\nByteStorage\n",
    "torch.storage\nUntypedStorage\n",
    "os\nsystem\n",
];

pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let pickle = archive(other).and_then(|members| members.into_iter().find(Member::is_pickle));
    let (others, _) = opcodes(pickle.as_ref().map_or(other, |member| &member.data));
    let Some(mut members) = archive(input) else {
        let (mut program, end) = opcodes(input);
        change(&mut program, &others, rng);
        return (!program.is_empty()).then(|| [&program.concat(), &input[end..]].concat());
    };
    let at = below(rng, members.len());
    match members.iter_mut().find(|member| member.is_pickle()) {
        Some(pickle) if !one_in(4, rng) => {
            let (mut program, _) = opcodes(&pickle.data);
            change(&mut program, &others, rng);
            pickle.data = program.concat();
        }
        _ => match below(rng, 4) {
            0 => edit_text(&mut members[at].name, &["archive/", "data.pkl", "byteorder"], rng),
            1 => members[at].data.resize(below(rng, 256), 1),
            2 => edit(&mut members[at].data, b"little\x003", rng),
            _ => edit(&mut members, &[], rng),
        },
    }
    Some(write(&members, rng))
}

/// Opcode with its argument.
type Opcode = Vec<u8>;

/// Splits pickles that follow each other into opcodes; returns these with the position after the last one.
fn opcodes(bytes: &[u8]) -> (Vec<Opcode>, usize) {
    let mut reader = Reader { bytes, at: 0 };
    let mut found: Vec<Opcode> = Vec::new();
    loop {
        let start = reader.at;
        let between = found.last().is_none_or(|last| last[0] == STOP);
        if between && bytes.get(start) != Some(&PROTO) || skip(&mut reader).is_none() {
            return (found, start);
        }
        found.push(bytes[start..reader.at].to_vec());
    }
}

/// Skips an opcode with its argument.
fn skip(reader: &mut Reader) -> Option<()> {
    match reader.uint(1)? as u8 {
        GLOBAL => {
            let rest = &reader.bytes[reader.at..];
            let lines: usize = rest.split_inclusive(|byte| *byte == b'\n').take(2).map(<[u8]>::len).sum();
            reader.take(lines as u64).map(drop)
        }
        opcode => match layout(opcode) {
            (0, nbytes) => reader.take(nbytes).map(drop),
            (prefix, _) => reader.prefixed(prefix).map(drop),
        },
    }
}

/// Returns two sizes in bytes: that of the length in front of an opcode's argument, 0 if there is none, and that of the
/// argument itself if it is fixed.
fn layout(opcode: u8) -> (u64, u64) {
    match opcode {
        b'U' | b'C' | 0x8a | 0x8c => (1, 0),
        b'T' | b'B' | b'X' => (4, 0),
        0x8d | 0x8e => (8, 0),
        b'K' | b'q' | b'h' | PROTO => (0, 1),
        b'M' => (0, 2),
        b'J' | b'r' | b'j' => (0, 4),
        b'G' | 0x95 => (0, 8),
        _ => (0, 0),
    }
}

/// Makes an opcode with an argument of these bytes, or as many of them as fit.
fn opcode(opcode: u8, mut argument: Vec<u8>) -> Opcode {
    let (prefix, nbytes) = layout(opcode);
    if opcode != GLOBAL {
        argument.resize(if prefix > 0 { argument.len().min(255) } else { nbytes as usize }, 0);
    }
    let length = (argument.len() as u64).to_le_bytes();
    [&[opcode], &length[..prefix as usize], &argument].concat()
}

/// Changes pickles in one to four places between their first and last opcode.
fn change(program: &mut Vec<Opcode>, others: &[Opcode], rng: &mut Rng) {
    let (first, last) = (program.first().cloned(), program.last().cloned());
    let mut body: Vec<Opcode> = program.iter().take(program.len().saturating_sub(1)).skip(1).cloned().collect();
    for _ in 0..=below(rng, 4) {
        let at = below(rng, body.len());
        match below(rng, 8) {
            0 | 1 => edit(&mut body, others, rng),
            2 => body.insert(at, vec![*pick(PLAIN, rng)]),
            3 => body.insert(at, opcode(GLOBAL, pick(CALLABLES, rng).as_bytes().to_vec())),
            4 => body.insert(at, opcode(*pick(WITH_ARGUMENT, rng), number(0, rng).to_le_bytes().to_vec())),
            _ => {
                let changed = body.iter_mut().skip(at).find(|opcode| opcode.len() > 1);
                changed.into_iter().for_each(|opcode| change_argument(opcode, rng));
            }
        }
    }
    *program = first.into_iter().chain(body).chain(last).collect();
}

fn change_argument(whole: &mut Opcode, rng: &mut Rng) {
    let code = whole[0];
    let mut argument = whole[1 + layout(code).0 as usize..].to_vec();
    *whole = match layout(code) {
        _ if code == GLOBAL => opcode(code, pick(CALLABLES, rng).as_bytes().to_vec()),
        (0, nbytes) => {
            let value = number(Reader { bytes: &argument, at: 0 }.uint(nbytes).unwrap_or(0), rng);
            // The opcode of long integers has room for numbers that do not fit in the old one.
            let code = if b"KMJ".contains(&code) && one_in(2, rng) { 0x8a } else { code };
            opcode(code, value.to_le_bytes().to_vec())
        }
        _ => {
            edit_text(&mut argument, &["storage", "0", "cpu", "a.weight"], rng);
            opcode(code, argument)
        }
    };
}

/// Member of a zip archive.
#[derive(Clone)]
struct Member {
    name: Vec<u8>,
    method: u16,
    data: Vec<u8>,
}

impl Member {
    fn is_pickle(&self) -> bool {
        self.name.ends_with(b"data.pkl")
    }
}

const LOCAL: &[u8] = b"PK\x03\x04";
const CENTRAL: &[u8] = b"PK\x01\x02";
const END: &[u8] = b"PK\x05\x06";
const END64: &[u8] = b"PK\x06\x06";
const LOCATOR64: &[u8] = b"PK\x06\x07";

/// Reads the members of a zip archive through its directory, which starts at the first signature of its records.
fn archive(input: &[u8]) -> Option<Vec<Member>> {
    input.starts_with(LOCAL).then_some(())?;
    let at = input.windows(4).position(|window| window == CENTRAL)?;
    let mut directory = Reader { bytes: input, at };
    let mut members = Vec::new();
    while directory.take(4)? == CENTRAL {
        let record = directory.take(42)?;
        let field = |at: usize, nbytes: u64| Reader { bytes: record, at }.uint(nbytes);
        let name = directory.take(field(24, 2)?)?.to_vec();
        directory.take(field(26, 2)? + field(28, 2)?)?;
        let mut local = Reader { bytes: input, at: field(38, 4)? as usize };
        local.take(26)?;
        let skipped = local.uint(2)? + local.uint(2)?;
        local.take(skipped)?;
        members.push(Member { name, method: field(6, 2)? as u16, data: local.take(field(16, 4)?)?.to_vec() });
    }
    (!members.is_empty()).then_some(members)
}

/// Writes a zip archive. In one of four calls it has zip64 records; in one of sixteen, the size of a member is wrong.
fn write(members: &[Member], rng: &mut Rng) -> Vec<u8> {
    let wrong = below(rng, 16 * members.len());
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (i, Member { name, method, data }) in members.iter().enumerate() {
        let exact = data.len() as u64;
        let size = (if i == wrong { number(exact, rng) } else { exact } as u32).to_le_bytes();
        let crc32 = crc32fast::hash(data).to_le_bytes();
        let lengths = (name.len() as u32).to_le_bytes();
        // Version and flags, method, time and date, checksum, sizes, lengths of the name and of the extra field.
        let fields = [&[20, 0, 0, 0], &method.to_le_bytes()[..], &[0; 4], &crc32, &size, &size, &lengths].concat();
        let start = (out.len() as u32).to_le_bytes();
        // The record of the directory has the writer's version before, and the comment's length, disk, attributes and
        // position after these fields.
        directory.extend([CENTRAL, &[20, 0], &fields, &[0; 10], &start, name].concat());
        out.extend([LOCAL, &fields, name, data].concat());
    }
    let numbers = [members.len(), directory.len(), out.len()];
    out.extend_from_slice(&directory);
    if one_in(4, rng) {
        let [count, nbytes, start] = numbers.map(|n| (n as u64).to_le_bytes());
        let at = (out.len() as u64).to_le_bytes();
        let fields = [&[44, 0, 0, 0, 0, 0, 0, 0, 45, 0, 45, 0], &[0; 8][..], &count, &count, &nbytes, &start].concat();
        out.extend([END64, &fields, LOCATOR64, &[0; 4], &at, &[1, 0, 0, 0]].concat());
    }
    let [count, nbytes, start] = numbers.map(|n| (n as u32).to_le_bytes());
    out.extend([END, &[0; 4], &count[..2], &count[..2], &nbytes, &start, &[0; 2]].concat());
    out
}
