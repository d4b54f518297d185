//! Prefix cache on disk: keeps full pages of keys and values, so that a later process reuses beginnings of texts.
//!
//! Each page is a file `xx/<name>.kv`, where `name` is the SHA-256, in hex, of the [`Key`], of the name of the page
//! before it and of the tokens of the page, and `xx` are its first two digits:
//!
//! ```text
//! header    "iec-kv\x01\n"; key (32 bytes); name of the page before, or zeros (32); number of tokens (u32) and tokens
//!           (u32 each); number of parts (u32) and the bytes of each part (u64 each)
//! payload   keys and values of each part, as in memory
//! digest    SHA-256 of header and payload (32)
//! ```
//!
//! All numbers are little-endian. A reader knows the header that it expects, so it compares the bytes and parses none.
//! A file that differs, or whose digest does not fit, is removed and counts as missing. Files appear by renaming, so a
//! process can be killed at any time; several processes may use one directory.

use super::radix::Key;
use super::radix::{NodeState, Snapshot};
use crate::error::{Context, Result};
use crate::files;
use crate::output::{AtomicFile, make_dir, remove_if_there, stale};
use crate::runtime::kv::PAGE;
use crate::runtime::state::{Piece, StatePool};
use crate::sha256::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Beginning of each file: name and version of the format.
const MAGIC: &[u8; 8] = b"iec-kv\x01\n";
/// Name of the directory of pages.
const DIRECTORY: &str = "prefix";
/// End of the names of page files.
const EXTENSION: &str = "kv";
/// Bytes of a digest.
const DIGEST: usize = 32;

/// Name of a page: the digest of its key, the page before it and its tokens.
pub(super) type PageName = [u8; DIGEST];

/// Place of a page: what its keys and values depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct PagePlace<'a> {
    pub key: &'a Key,
    /// Name of the page before, or zeros.
    pub before: PageName,
    pub tokens: &'a [u32],
}

impl PagePlace<'_> {
    /// Returns the name of the page.
    pub fn name(&self) -> PageName {
        let mut hash = Sha256::new();
        hash.update(MAGIC);
        hash.update(self.key);
        hash.update(self.before);
        self.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
        hash.finalize().into()
    }

    /// Returns the header of the file of a page whose pieces have these numbers of bytes.
    fn header(&self, pieces: &[usize]) -> Vec<u8> {
        let mut header = [&MAGIC[..], self.key, &self.before].concat();
        header.extend((self.tokens.len() as u32).to_le_bytes());
        self.tokens.iter().for_each(|token| header.extend(token.to_le_bytes()));
        header.extend((pieces.len() as u32).to_le_bytes());
        pieces.iter().for_each(|bytes| header.extend((*bytes as u64).to_le_bytes()));
        header
    }
}

/// Result of [`PrefixCache::save`](super::PrefixCache::save).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Saved {
    /// Number of written pages.
    pub written: usize,
    /// Bytes of the written pages.
    pub bytes: u64,
    /// Number of pages that were removed because the limit was reached.
    pub removed: usize,
}

/// Number of pages by what happened to their files since the directory was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DiskCounts {
    /// Pages that were read.
    pub hit: usize,
    /// Pages that were looked up and are not there.
    pub miss: usize,
    /// Pages whose files were damaged and are removed.
    pub damaged: usize,
    /// Pages that were written.
    pub written: usize,
    /// Pages that left because the limit was reached.
    pub evicted: usize,
}

/// Directory of pages with a limit of its size.
#[derive(Debug)]
pub(super) struct PrefixStore {
    /// Numbers of pages for reports.
    pub counts: DiskCounts,
    dir: PathBuf,
    limit: u64,
    files: HashMap<PageName, Kept>,
    bytes: u64,
}

/// File of a page.
#[derive(Debug, Clone, Copy)]
struct Kept {
    bytes: u64,
    used: SystemTime,
}

impl PrefixStore {
    /// Opens or creates the directory `prefix` in `state`. `limit` is the largest size of all files in bytes.
    ///
    /// # Errors
    /// The directory cannot be created or read.
    pub fn open(state: &Path, limit: u64) -> Result<PrefixStore> {
        let dir = state.join(DIRECTORY);
        // The pages tell what texts were about, so only their owner may read them.
        if make_dir(&dir)? {
            std::fs::set_permissions(&dir, Permissions::from_mode(0o700)).at(&dir)?;
        }
        let mut store = PrefixStore { counts: DiskCounts::default(), dir, limit, files: HashMap::new(), bytes: 0 };
        for entry in std::fs::read_dir(&store.dir).at(&store.dir)? {
            let sub = entry.at(&store.dir)?.path();
            stale::remove(&sub);
            for file in std::fs::read_dir(&sub).into_iter().flatten().flatten() {
                let (Some(name), Ok(found)) = (page_of(&file.path()), file.metadata()) else { continue };
                if found.is_file() && store.path(&name) == file.path() {
                    let used = found.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                    store.bytes += found.len();
                    store.files.insert(name, Kept { bytes: found.len(), used });
                }
            }
        }
        Ok(store)
    }

    /// Returns true if there is a file of the page, which may be damaged.
    pub fn has(&self, name: &PageName) -> bool {
        self.files.contains_key(name)
    }

    /// Reads a page of a text with its snapshot, if it was written with one. Returns none if there is no such page; a
    /// file that is not what this page was written as is removed.
    ///
    /// # Errors
    /// There is not enough memory.
    pub fn read(&mut self, place: &PagePlace<'_>, pools: &[Box<dyn StatePool>]) -> Result<Option<NodeState>> {
        let name = place.name();
        let Some(kept) = self.files.get(&name) else { return Ok(None) };
        let pages = piece_sizes(pools, false);
        let has_snapshot = kept.bytes != file_bytes(place, &pages);
        let sizes = if has_snapshot { piece_sizes(pools, true) } else { pages };
        let path = self.path(&name);
        let bytes = files::read_limited(&path, file_bytes(place, &sizes)).unwrap_or_default();
        let content =
            page_content(&bytes, &place.header(&sizes)).filter(|rest| rest.len() == sizes.iter().sum::<usize>());
        let Some(mut rest) = content else {
            self.counts.damaged += 1;
            self.remove(&name);
            return Ok(None);
        };
        let mut piece = |pool: &dyn StatePool, bytes: u64| {
            let (content, after) = rest.split_at(bytes as usize);
            rest = after;
            pool.restore(content)
        };
        let read = pools.iter().map(|pool| piece(&**pool, pool.page_bytes())).collect::<Result<Vec<Piece>>>()?;
        let snapshot = has_snapshot.then(|| {
            let mut of = |pool: &dyn StatePool| match pool.snapshot_bytes() {
                0 => Ok(None),
                bytes => piece(pool, bytes).map(Some),
            };
            pools.iter().map(|pool| of(&**pool)).collect::<Result<Vec<_>>>()
        });
        let snapshot = snapshot.transpose()?.map(|parts| Snapshot { tokens: PAGE, parts });
        let state = NodeState { pages: read, snapshots: snapshot.into_iter().collect() };
        self.counts.hit += 1;
        let used = SystemTime::now();
        self.files.entry(name).and_modify(|kept| kept.used = used);
        // Other processes see the use in the time of the file; without it the page may only leave earlier.
        let _ = files::open(&path).map(|file| file.set_modified(used));
        Ok(Some(state))
    }

    /// Writes a page that is not there yet, or is there without its snapshot, and removes those that were used least
    /// recently beyond the limit.
    ///
    /// # Errors
    /// The file cannot be written, or the device that holds the page fails.
    pub fn write(
        &mut self,
        place: &PagePlace<'_>,
        state: &NodeState,
        pools: &[Box<dyn StatePool>],
        saved: &mut Saved,
    ) -> Result<()> {
        let snapshot = state.snapshot(PAGE);
        let (name, sizes) = (place.name(), piece_sizes(pools, snapshot.is_some()));
        let (bytes, replaced) = (file_bytes(place, &sizes), self.files.get(&name).map_or(0, |kept| kept.bytes));
        if bytes > self.limit || replaced >= bytes {
            return Ok(());
        }
        while self.bytes - replaced + bytes > self.limit {
            let others = self.files.iter().filter(|(other, _)| **other != name);
            let oldest = others.min_by_key(|(name, kept)| (kept.used, **name)).map(|(name, _)| *name);
            let Some(oldest) = oldest else { break };
            self.remove(&oldest);
            saved.removed += 1;
            self.counts.evicted += 1;
        }
        let path = self.path(&name);
        make_dir(path.parent().expect("a directory of two digits"))?;
        let mut file = AtomicFile::create_private(&path)?.overwrite(true);
        let mut hash = Sha256::new();
        let parts = snapshot.iter().flat_map(|snapshot| &snapshot.parts).flatten();
        let pieces = state.pages.iter().chain(parts).map(Piece::bytes);
        for piece in std::iter::once(Ok(place.header(&sizes).into())).chain(pieces) {
            let piece = piece?;
            hash.update(&piece);
            file.write_all(&piece).at(&path)?;
        }
        file.write_all(&hash.finalize()).at(&path)?;
        file.commit()?;
        self.bytes = self.bytes - replaced + bytes;
        self.counts.written += 1;
        self.files.insert(name, Kept { bytes, used: SystemTime::now() });
        (saved.written, saved.bytes) = (saved.written + 1, saved.bytes + bytes);
        Ok(())
    }

    /// Forgets a page and removes its file. A file that cannot be removed only takes space.
    pub fn remove(&mut self, name: &PageName) {
        if let Some(kept) = self.files.remove(name) {
            self.bytes -= kept.bytes;
        }
        let _ = remove_if_there(&self.path(name));
    }

    /// Forgets all pages and removes their files.
    pub fn clear(&mut self) {
        let names: Vec<PageName> = self.files.keys().copied().collect();
        names.iter().for_each(|name| self.remove(name));
    }

    fn path(&self, name: &PageName) -> PathBuf {
        let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        self.dir.join(&hex[..2]).join(format!("{hex}.{EXTENSION}"))
    }
}

/// Returns the payload of the file of a page; `None` if the file has another header or its digest does not fit.
pub fn page_content<'a>(file: &'a [u8], header: &[u8]) -> Option<&'a [u8]> {
    let (content, digest) = file.split_at_checked(file.len().checked_sub(DIGEST)?)?;
    let payload = content.strip_prefix(header)?;
    (Sha256::digest(content)[..] == *digest).then_some(payload)
}

/// Returns the bytes of the pieces of a page: that of each part, then the snapshots, if it has them.
fn piece_sizes(pools: &[Box<dyn StatePool>], has_snapshot: bool) -> Vec<usize> {
    let pages = pools.iter().map(|pool| pool.page_bytes());
    let snapshots = pools.iter().map(|pool| pool.snapshot_bytes()).filter(|bytes| has_snapshot && *bytes > 0);
    pages.chain(snapshots).map(|bytes| bytes as usize).collect()
}

/// Returns the bytes of the file of a page whose pieces have these numbers of bytes.
fn file_bytes(place: &PagePlace<'_>, pieces: &[usize]) -> u64 {
    (place.header(pieces).len() + pieces.iter().sum::<usize>() + DIGEST) as u64
}

/// Returns the page of a file name; `None` for other files.
fn page_of(path: &Path) -> Option<PageName> {
    let stem = path.file_stem()?.to_str().filter(|stem| stem.len() == 2 * DIGEST && stem.is_ascii())?;
    let mut name = PageName::default();
    for (byte, i) in name.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&stem[i..i + 2], 16).ok()?;
    }
    (path.extension()? == EXTENSION).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::kv::{KvHeads, KvLayout, KvType, PagePool};
    use crate::runtime::state::PageCounts;
    use std::sync::Arc;

    fn layout() -> KvLayout {
        KvLayout::new(KvType::F16, [KvHeads::new(1, 2)])
    }
    const KEY: Key = [3; 32];
    const LIMIT: u64 = 1 << 30;

    fn tokens(first: u32) -> Vec<u32> {
        (first..first + PAGE as u32).collect()
    }

    /// Returns two pages with bytes that depend on `seed`.
    fn pages(pool: &Arc<PagePool>, seed: u8) -> NodeState {
        let page = |part: u8| {
            let mut page = pool.page().unwrap();
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(page.get_mut().unwrap());
            (0..).zip(bytes).for_each(|(i, byte)| *byte = (i as u8).wrapping_mul(7) ^ seed ^ part);
            page.piece()
        };
        NodeState { pages: vec![page(1), page(2)], snapshots: Vec::new() }
    }

    /// Returns the pool of each of two parts.
    fn pools(pool: &Arc<PagePool>) -> [Box<dyn StatePool>; 2] {
        [Box::new(pool.clone()), Box::new(pool.clone())]
    }

    fn read(store: &mut PrefixStore, pool: &Arc<PagePool>, place: &PagePlace<'_>) -> Option<Vec<u8>> {
        store.read(place, &pools(pool)).unwrap().as_ref().map(bytes)
    }

    fn bytes(state: &NodeState) -> Vec<u8> {
        state.pages.iter().flat_map(|page| page.bytes().unwrap().into_owned()).collect()
    }

    #[test]
    fn a_page_is_read_where_it_was_written_and_nowhere_else() {
        let (dir, pool) = (tempfile::tempdir().unwrap(), PagePool::new(layout(), None).unwrap());
        let (first, second) = (tokens(1), tokens(500));
        let root = PagePlace { key: &KEY, before: PageName::default(), tokens: &first };
        let next = PagePlace { key: &KEY, before: root.name(), tokens: &second };
        let mut store = PrefixStore::open(dir.path(), LIMIT).unwrap();
        let mut saved = Saved::default();
        for _ in 0..2 {
            store.write(&root, &pages(&pool, 10), &pools(&pool), &mut saved).unwrap();
            store.write(&next, &pages(&pool, 20), &pools(&pool), &mut saved).unwrap();
        }
        assert_eq!((saved.written, saved.removed), (2, 0));
        for mut store in [store, PrefixStore::open(dir.path(), LIMIT).unwrap()] {
            assert_eq!(store.bytes, saved.bytes);
            assert_eq!(read(&mut store, &pool, &root), Some(bytes(&pages(&pool, 10))));
            assert_eq!(read(&mut store, &pool, &next), Some(bytes(&pages(&pool, 20))));
            let other: Key = [4; 32];
            for place in [
                PagePlace { key: &other, ..root },
                PagePlace { before: root.name(), ..root },
                PagePlace { before: PageName::default(), ..next },
                PagePlace { tokens: &second, ..root },
            ] {
                assert_eq!(read(&mut store, &pool, &place), None);
            }
        }
    }

    #[test]
    fn every_flipped_byte_and_every_other_length_makes_the_file_disappear() {
        let (dir, pool) = (tempfile::tempdir().unwrap(), PagePool::new(layout(), None).unwrap());
        let ids = tokens(9);
        let place = PagePlace { key: &KEY, before: PageName::default(), tokens: &ids };
        let mut store = PrefixStore::open(dir.path(), LIMIT).unwrap();
        store.write(&place, &pages(&pool, 1), &pools(&pool), &mut Saved::default()).unwrap();
        let path = store.path(&place.name());
        let good = std::fs::read(&path).unwrap();
        let mut damaged: Vec<Vec<u8>> = (0..good.len()).map(|i| flipped(&good, i)).collect();
        damaged.extend([good[..good.len() - 1].to_vec(), Vec::new(), [&good[..], &[0]].concat()]);
        for bytes in damaged {
            std::fs::write(&path, bytes).unwrap();
            let mut store = PrefixStore::open(dir.path(), LIMIT).unwrap();
            assert_eq!(read(&mut store, &pool, &place), None);
            assert!(path.symlink_metadata().is_err() && store.bytes == 0 && store.files.is_empty());
        }
        std::fs::write(&path, &good).unwrap();
        let mut store = PrefixStore::open(dir.path(), LIMIT).unwrap();
        assert!(read(&mut store, &pool, &place).is_some());
    }

    fn flipped(good: &[u8], i: usize) -> Vec<u8> {
        let mut bytes = good.to_vec();
        bytes[i] ^= 1 << (i % 8);
        bytes
    }

    #[test]
    fn pages_that_were_used_least_recently_leave_and_other_files_stay() {
        let (dir, pool) = (tempfile::tempdir().unwrap(), PagePool::new(layout(), None).unwrap());
        let texts: Vec<Vec<u32>> = (0..5).map(|i| tokens(1000 * i)).collect();
        let place = |i: usize| PagePlace { key: &KEY, before: PageName::default(), tokens: &texts[i] };
        let mut one = Saved::default();
        PrefixStore::open(dir.path(), LIMIT)
            .unwrap()
            .write(&place(0), &pages(&pool, 0), &pools(&pool), &mut one)
            .unwrap();
        let foreign = [dir.path().join(DIRECTORY).join("note.txt"), dir.path().join(DIRECTORY).join("zz")];
        foreign.iter().for_each(|path| std::fs::write(path, "mine").unwrap());
        let mut store = PrefixStore::open(dir.path(), 3 * one.bytes).unwrap();
        let mut saved = Saved::default();
        for i in 1..3 {
            store.write(&place(i), &pages(&pool, 0), &pools(&pool), &mut saved).unwrap();
        }
        assert!(read(&mut store, &pool, &place(0)).is_some());
        for i in 3..5 {
            store.write(&place(i), &pages(&pool, 0), &pools(&pool), &mut saved).unwrap();
        }
        assert_eq!((saved.written, saved.removed, store.bytes), (4, 2, 3 * one.bytes));
        let kept: Vec<bool> = (0..5).map(|i| read(&mut store, &pool, &place(i)).is_some()).collect();
        assert_eq!(kept, [true, false, false, true, true]);
        assert!(foreign.iter().all(|path| path.is_file()));
        let mut small = PrefixStore::open(dir.path(), one.bytes - 1).unwrap();
        small.write(&place(1), &pages(&pool, 0), &pools(&pool), &mut saved).unwrap();
        assert_eq!(small.files.len(), 3, "a page that is larger than the limit changes nothing");
    }

    /// Pool whose snapshots have the size of pages.
    #[derive(Debug)]
    struct WithSnapshots(Arc<PagePool>);

    impl StatePool for WithSnapshots {
        fn page_bytes(&self) -> u64 {
            self.0.page_bytes()
        }

        fn snapshot_bytes(&self) -> u64 {
            self.0.page_bytes()
        }

        fn most(&self) -> Option<usize> {
            None
        }

        fn counts(&self) -> PageCounts {
            self.0.counts()
        }

        fn memory_left(&self) -> Option<u64> {
            None
        }

        fn restore(&self, bytes: &[u8]) -> Result<Piece> {
            self.0.restore(bytes)
        }
    }

    #[test]
    fn a_page_is_written_again_when_it_has_a_snapshot_and_never_without_it() {
        let (dir, pool) = (tempfile::tempdir().unwrap(), PagePool::new(layout(), None).unwrap());
        let pools: [Box<dyn StatePool>; 2] = [Box::new(pool.clone()), Box::new(WithSnapshots(pool.clone()))];
        let (ids, plain) = (tokens(1), pages(&pool, 1));
        let place = PagePlace { key: &KEY, before: PageName::default(), tokens: &ids };
        let snapshot = vec![None, Some(pages(&pool, 9).pages.remove(0))];
        let snapshots = [10, PAGE].map(|tokens| Snapshot { tokens, parts: snapshot.clone() }).to_vec();
        let whole = NodeState { snapshots, ..plain.clone() };
        let one = file_bytes(&place, &piece_sizes(&pools, false));
        let mut store = PrefixStore::open(dir.path(), 2 * one).unwrap();
        let kept = |store: &mut PrefixStore| {
            let read = store.read(&place, &pools).unwrap().unwrap();
            assert_eq!(bytes(&read), bytes(&plain));
            assert!(read.snapshots.len() <= 1, "only that after the last token is written");
            read.snapshot(PAGE).map(|found| found.parts[1].as_ref().unwrap().bytes().unwrap().into_owned())
        };
        for (state, has_snapshot) in [(&plain, false), (&whole, true), (&plain, true)] {
            store.write(&place, state, &pools, &mut Saved::default()).unwrap();
            assert_eq!(kept(&mut store).is_some(), has_snapshot);
            assert_eq!(PrefixStore::open(dir.path(), LIMIT).unwrap().bytes, store.bytes);
        }
        assert_eq!(kept(&mut store), Some(pages(&pool, 9).pages[0].bytes().unwrap().into_owned()));
        assert_eq!((store.files.len(), store.bytes), (1, file_bytes(&place, &piece_sizes(&pools, true))));
    }
}
