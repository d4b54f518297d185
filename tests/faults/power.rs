//! Simulated power cuts. A power cut keeps what was synced and any part of the rest: contents of files are safe after
//! `fsync` of the file, changes of names after `fsync` of the directory.
//!
//! A [`Recorder`] lists the changes of one undisturbed run in a model of the directory. For every moment of the run,
//! the directory is rebuilt in several ways: from the changes that are safe by then, and from none, all, all but one,
//! or only one of the changes that are not. A change that builds on a lost one is lost, too, because the journals of
//! file systems keep this order. A file that was never synced is empty. The rebuilt directory must meet the same
//! conditions as after a killed process.

use crate::call::{Call, Kind};
use crate::stage::{self, Prepared};
use crate::state::{self, State};
use crate::tracer::{self, Decision, Observer};
use crate::trial::{wrong_rerun, wrong_state};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

/// Number of a file, directory or link in the model.
type Id = usize;
/// Number of a directory and a name in it.
type Place = (Id, String);

/// Content of a directory, link or file.
#[derive(Debug, Clone)]
enum Node {
    Directory(BTreeMap<String, Id>),
    Link(PathBuf),
    /// Content after the last sync; for files that existed before the run, also the time of their last change.
    File(Rc<Vec<u8>>, u32, Option<SystemTime>),
}

/// A change in the directory, or a sync.
#[derive(Debug, Clone)]
enum Event {
    /// A name is given to a node, which may be new.
    Name(Place, Id),
    Unname(Place),
    Rename(Place, Place),
    Exchange(Place, Place),
    SyncFile(Id, Rc<Vec<u8>>, u32),
    SyncDirectory(Id),
}

impl Event {
    /// Returns the names that the event changes; none for a sync.
    fn places(&self) -> Vec<&Place> {
        match self {
            Event::Name(place, _) | Event::Unname(place) => vec![place],
            Event::Rename(a, b) | Event::Exchange(a, b) => vec![a, b],
            Event::SyncFile(..) | Event::SyncDirectory(_) => Vec::new(),
        }
    }
}

/// Returns the permissions of a file.
fn mode(path: &Path) -> u32 {
    path.metadata().map_or(0o600, |metadata| metadata.permissions().mode())
}

/// All nodes that ever existed; 0 is the root.
#[derive(Debug, Clone)]
struct Tree(Vec<Node>);

impl Tree {
    fn read(root: &Path) -> Tree {
        let mut tree = Tree(vec![Node::Directory(BTreeMap::new())]);
        tree.add_entries(0, root);
        tree
    }

    fn add_entries(&mut self, directory: Id, path: &Path) {
        for entry in fs::read_dir(path).expect("the directory can be read").flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            let id = self.0.len();
            if let Ok(target) = path.read_link() {
                self.0.push(Node::Link(target));
            } else if path.is_dir() {
                self.0.push(Node::Directory(BTreeMap::new()));
                self.add_entries(id, &path);
            } else {
                let modified = path.metadata().and_then(|metadata| metadata.modified()).ok();
                self.0.push(Node::File(Rc::new(fs::read(&path).unwrap_or_default()), mode(&path), modified));
            }
            self.names(directory).insert(name, id);
        }
    }

    fn names(&mut self, directory: Id) -> &mut BTreeMap<String, Id> {
        match &mut self.0[directory] {
            Node::Directory(names) => names,
            other => panic!("{other:?} is no directory"),
        }
    }

    fn find(&self, path: &Path) -> Option<Id> {
        path.components().try_fold(0, |id, part| match &self.0[id] {
            Node::Directory(names) => names.get(part.as_os_str().to_str()?).copied(),
            _ => None,
        })
    }

    fn apply(&mut self, event: &Event) {
        match event {
            Event::Name((directory, name), id) => drop(self.names(*directory).insert(name.clone(), *id)),
            Event::Unname((directory, name)) => drop(self.names(*directory).remove(name)),
            Event::Rename(from, to) => {
                if let Some(id) = self.names(from.0).remove(&from.1) {
                    self.names(to.0).insert(to.1.clone(), id);
                }
            }
            Event::Exchange(a, b) => {
                let (first, second) = (self.names(a.0).remove(&a.1), self.names(b.0).remove(&b.1));
                first.map(|id| self.names(b.0).insert(b.1.clone(), id));
                second.map(|id| self.names(a.0).insert(a.1.clone(), id));
            }
            Event::SyncFile(id, bytes, mode) => self.0[*id] = Node::File(bytes.clone(), *mode, None),
            Event::SyncDirectory(_) => {}
        }
    }

    fn write(&self, directory: Id, path: &Path) {
        let Node::Directory(names) = &self.0[directory] else { return };
        fs::create_dir(path).expect("the directory is new");
        for (name, id) in names {
            let path = path.join(name);
            match &self.0[*id] {
                Node::Directory(_) => self.write(*id, &path),
                Node::Link(target) => std::os::unix::fs::symlink(target, path).expect("the name is new"),
                Node::File(bytes, mode, modified) => {
                    fs::write(&path, &**bytes).expect("writable");
                    fs::set_permissions(&path, fs::Permissions::from_mode(*mode)).expect("a file of this test");
                    let file = fs::File::options().append(true).open(path).expect("writable");
                    modified.map(|time| file.set_modified(time).expect("times can be set"));
                }
            }
        }
    }
}

/// Lists the changes of a run.
pub struct Recorder {
    root: PathBuf,
    before: Tree,
    now: Tree,
    events: Vec<Event>,
}

impl Recorder {
    pub fn new(root: &Path) -> Recorder {
        let before = Tree::read(root);
        Recorder { root: root.to_path_buf(), now: before.clone(), before, events: Vec::new() }
    }

    fn place(&self, path: &Path) -> Option<Place> {
        let path = path.strip_prefix(&self.root).ok()?;
        Some((self.now.find(path.parent()?)?, path.file_name()?.to_str()?.to_string()))
    }

    fn id(&self, path: &Path) -> Option<Id> {
        self.now.find(path.strip_prefix(&self.root).ok()?)
    }

    /// Adds a node to both trees, so that its number is the same in all.
    fn add(&mut self, node: Node) -> Id {
        self.before.0.push(node.clone());
        self.now.0.push(node);
        self.now.0.len() - 1
    }

    fn event(&mut self, call: &Call) -> Option<Event> {
        let place = self.place(&call.path);
        let from = call.from.as_deref();
        Some(match call.kind {
            Kind::Open if self.id(&call.path).is_some() => return None,
            Kind::Open => Event::Name(place?, self.add(Node::File(Rc::default(), mode(&call.path), None))),
            Kind::Mkdir => Event::Name(place?, self.add(Node::Directory(BTreeMap::new()))),
            Kind::Symlink => Event::Name(place?, self.add(Node::Link(from?.to_path_buf()))),
            Kind::Link => Event::Name(place?, self.id(from?)?),
            Kind::Unlink => Event::Unname(place?),
            Kind::Rename if call.flags & u64::from(libc::RENAME_EXCHANGE) != 0 => {
                Event::Exchange(self.place(from?)?, place?)
            }
            Kind::Rename if self.id(from?) == self.id(&call.path) => return None,
            Kind::Rename => Event::Rename(self.place(from?)?, place?),
            Kind::Sync => {
                let id = self.id(&call.path)?;
                match &self.now.0[id] {
                    Node::Directory(_) => Event::SyncDirectory(id),
                    _ => Event::SyncFile(id, Rc::new(fs::read(&call.path).ok()?), mode(&call.path)),
                }
            }
            _ => return None,
        })
    }

    /// Rebuilds the directory after the first `until` events as a power cut may leave it, in several ways.
    fn remainders(&self, until: usize) -> Vec<Tree> {
        let events = &self.events[..until];
        // A change of a name is safe if its directory (for a rename, one of the two) was synced later, or if a safe
        // change builds on it.
        let mut safe: Vec<(&Event, bool)> = events.iter().map(|event| (event, false)).collect();
        for i in (0..until).rev() {
            let directories: BTreeSet<Id> = events[i].places().iter().map(|place| place.0).collect();
            let is_safe = directories.is_empty()
                || safe[i..].iter().any(|(later, is_safe)| match later {
                    Event::SyncDirectory(id) => directories.contains(id),
                    later => *is_safe && later.places().iter().any(|place| events[i].places().contains(place)),
                });
            safe[i].1 = is_safe;
        }
        let unsafe_events: Vec<usize> = (0..until).filter(|i| !safe[*i].1).collect();
        let rebuilt = |is_lost: &dyn Fn(usize) -> bool| {
            let (mut tree, mut lost) = (self.before.clone(), BTreeSet::new());
            for (i, event) in events.iter().enumerate() {
                let depends = event.places().iter().any(|place| lost.contains(*place));
                if unsafe_events.contains(&i) && (depends || is_lost(i)) {
                    lost.extend(event.places().into_iter().cloned());
                } else {
                    tree.apply(event);
                }
            }
            tree
        };
        let mut trees = vec![rebuilt(&|_| true)];
        if !unsafe_events.is_empty() {
            trees.push(rebuilt(&|_| false));
        }
        for one in unsafe_events.iter().filter(|_| unsafe_events.len() > 1) {
            trees.push(rebuilt(&|i| i == *one));
            trees.push(rebuilt(&|i| i != *one));
        }
        trees
    }
}

impl Observer for Recorder {
    fn before(&mut self, _: &Call) -> Decision {
        Decision::Make
    }

    fn after(&mut self, call: &Call, result: i64) {
        if result >= 0
            && let Some(event) = self.event(call)
        {
            self.now.apply(&event);
            self.events.push(event);
        }
    }
}

/// Number of simulated power cuts, and what is wrong after them.
#[derive(Debug, Default)]
pub struct Cuts {
    pub states: usize,
    pub wrong: Vec<String>,
}

/// Records the changes that `run` makes, and checks the states that a power cut may leave at `points` equally distant
/// moments and after the end. After the end, the output must be the new one.
pub fn cut(prepared: &Prepared, points: usize, run: impl FnOnce(&mut Recorder, &Path)) -> Cuts {
    let root = prepared.fresh();
    let mut recorder = Recorder::new(&root);
    run(&mut recorder, &root);
    let (count, mut cuts, mut seen) = (recorder.events.len(), Cuts::default(), BTreeSet::new());
    for until in (0..points.min(count)).map(|i| i * count / points.min(count)).chain([count]) {
        for tree in recorder.remainders(until) {
            fs::remove_dir_all(&root).expect("the directory can be removed");
            tree.write(0, &root);
            let name = |line: String| {
                format!("{}, power cut after {until} of {count} changes: {line}", prepared.scenario.name)
            };
            let is_wrong_at_end =
                until == count && prepared.scenario.after.is_empty() && State::read(&root).files != prepared.new.files;
            if is_wrong_at_end {
                cuts.wrong.push(name(format!("the output is lost: {:?}", state::names(&root))));
            }
            if seen.insert(format!("{:?} {:?}", State::read(&root), state::names(&root))) {
                cuts.states += 1;
                let wrong = wrong_state(prepared, &root).into_iter().chain(wrong_rerun(prepared, &root));
                cuts.wrong.extend(wrong.map(name));
            }
        }
    }
    cuts
}

/// Runs the scenario with nothing but the recorder.
pub fn undisturbed(prepared: &Prepared, recorder: &mut Recorder, root: &Path) {
    let outcome = tracer::run(&mut stage::program(prepared.scenario.line, root), root, recorder);
    assert_eq!(outcome.exit, Ok(0), "{}: {}", prepared.scenario.name, outcome.said);
}
