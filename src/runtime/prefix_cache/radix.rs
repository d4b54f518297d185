//! Radix tree of the prefix cache: finds the pages of the longest known beginning of a text.
//!
//! A node holds the tokens of one page and a reference to the page, one per part of the model; its children are the
//! known continuations. Only full pages have children. A search compares tokens, so it may end within a page, whose
//! remaining positions are then not used. Trees of different keys share nothing.
//!
//! Models whose states have memory of fixed size, which does not tell how it was before its last position, need a
//! snapshot of it besides the pages. Some nodes have one or more, of the state after some of their tokens; a search
//! then ends at one of these.
//!
//! A sequence uses the nodes of its full pages from the root on, so no used node lies below an unused one. When memory
//! is needed, the unused leaf of the smallest value leaves. The value of a node is the cost of computing it again plus
//! the value of the last node that left when this one was last used (the GreedyDual rule): among nodes of equal cost
//! the least recently used one leaves first, and a node of twice the cost stays about twice as long.

use crate::runtime::kv::PAGE;
use crate::runtime::sequence::SharedState;
use crate::runtime::state::Piece;
use std::collections::HashMap;

/// Digest of everything but the tokens that keys and values depend on.
pub type Key = [u8; 32];

/// Index of a node.
pub type NodeId = usize;

/// Known beginnings of texts with their pages.
#[derive(Debug, Default)]
pub struct RadixTree {
    /// Nodes by index; `None` = removed.
    nodes: Vec<Option<Node>>,
    /// Indices of removed nodes.
    vacant: Vec<NodeId>,
    /// First nodes of the texts of each key.
    roots: HashMap<Key, Vec<NodeId>>,
    /// Value of the node that left last.
    clock: f64,
    /// Cost of attention to one position, in units of the cost of a token's products.
    attention_cost: f64,
    /// Number of pages that a snapshot takes of the budget; 0 = the model needs none.
    snapshot_pages: usize,
    /// Number of snapshots of all nodes.
    snapshots: usize,
    /// Number of nodes that no sequence uses.
    idle: usize,
    /// Uses of nodes beyond the first of each.
    repeated: usize,
}

#[derive(Debug)]
struct Node {
    /// Tokens of the page: 1 to [`PAGE`].
    tokens: Vec<u32>,
    state: NodeState,
    above: Above,
    children: Vec<NodeId>,
    /// Position of the first token.
    position: usize,
    value: f64,
    /// Number of sequences that use the page.
    uses: usize,
    /// Whether the page was written to disk.
    saved: bool,
}

/// State that a node holds.
#[derive(Debug, Clone, Default)]
pub struct NodeState {
    /// Page of each part.
    pub pages: Vec<Piece>,
    /// Snapshots after some of the tokens.
    pub snapshots: Vec<Snapshot>,
}

/// Memory of fixed size after some tokens of a page.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Number of tokens of the page.
    pub tokens: usize,
    /// Snapshot of each part; `None` for parts that need none.
    pub parts: Vec<Option<Piece>>,
}

impl NodeState {
    /// Returns the snapshot after so many tokens of the page.
    pub fn snapshot(&self, tokens: usize) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.tokens == tokens)
    }
}

/// Predecessor of a node.
#[derive(Debug, Clone, Copy)]
enum Above {
    Root(Key),
    Node(NodeId),
}

impl Node {
    fn is_unused_leaf(&self) -> bool {
        self.children.is_empty() && self.uses == 0
    }
}

/// A full page of the tree.
#[derive(Debug, Clone, Copy)]
pub struct FullPage<'a> {
    /// Key of its text.
    pub key: &'a Key,
    /// Its node.
    pub node: NodeId,
    /// Node of the page before it.
    pub before: Option<NodeId>,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Its page and snapshot.
    pub state: &'a NodeState,
    /// Whether it was written to disk.
    pub saved: bool,
}

/// The longest known beginning of a text.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Hit {
    /// Number of tokens.
    pub tokens: usize,
    /// Nodes of these tokens, the last of which may hold more tokens.
    pub nodes: Vec<NodeId>,
}

impl Hit {
    /// Returns the nodes of which all tokens belong to the hit.
    pub fn full(&self) -> &[NodeId] {
        &self.nodes[..self.tokens / PAGE]
    }
}

impl RadixTree {
    /// Creates an empty tree. `attention_cost` is the cost of attention to one position, relative to that of a token's
    /// products; `snapshot_pages` is the number of pages that a snapshot takes, 0 if the model needs none.
    pub fn new(attention_cost: f64, snapshot_pages: usize) -> RadixTree {
        RadixTree { attention_cost, snapshot_pages, ..RadixTree::default() }
    }

    /// Finds the longest beginning of `ids` whose state is known.
    pub fn find(&self, key: &Key, ids: &[u32]) -> Hit {
        let (mut walked, mut found) = (Hit::default(), Hit::default());
        let mut next = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        while let Some((index, common)) = self.best_of(next, &ids[walked.tokens..]) {
            if let Some((last, tokens)) = self.longest_snapshot(next, &ids[walked.tokens..]) {
                found = Hit { tokens: walked.tokens + tokens, nodes: [&walked.nodes[..], &[last]].concat() };
            }
            walked.tokens += common;
            walked.nodes.push(index);
            if common < PAGE {
                break;
            }
            next = &self.node(index).children;
        }
        if self.snapshot_pages == 0 { walked } else { found }
    }

    /// Finds the nodes of the full pages of `ids` that are known.
    pub fn find_pages(&self, key: &Key, ids: &[u32]) -> Vec<NodeId> {
        let mut nodes = Vec::new();
        let mut next = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        for page in ids.chunks_exact(PAGE) {
            let Some((index, PAGE)) = self.best_of(next, page) else { break };
            nodes.push(index);
            next = &self.node(index).children;
        }
        nodes
    }

    /// Returns the state of a beginning that [`RadixTree::find`] found.
    pub fn state_of(&self, hit: &Hit) -> SharedState {
        let states = || hit.nodes.iter().map(|index| &self.node(*index).state);
        let parts = states().next().map_or(0, |first| first.pages.len());
        let pages = (0..parts).map(|part| states().map(|state| state.pages[part].clone()).collect()).collect();
        let tokens = hit.tokens - hit.nodes.len().saturating_sub(1) * PAGE;
        let snapshot = states().next_back().and_then(|last| last.snapshot(tokens));
        SharedState { pages, snapshots: snapshot.map_or_else(|| vec![None; parts], |found| found.parts.clone()) }
    }

    /// Counts the nodes among `nodes` that no sequence uses.
    pub fn idle_among(&self, nodes: &[NodeId]) -> usize {
        nodes.iter().filter(|index| self.node(**index).uses == 0).count()
    }

    /// Counts one more use of `nodes`, a path from the root.
    pub fn acquire(&mut self, nodes: &[NodeId]) {
        for index in nodes {
            self.touch(*index);
            let node = self.node_mut(*index);
            node.uses += 1;
            if node.uses == 1 {
                self.idle -= 1;
            } else {
                self.repeated += 1;
            }
        }
    }

    /// Ends one use of `nodes`. Returns how many of them no other sequence uses.
    pub fn release(&mut self, nodes: &[NodeId]) -> usize {
        let mut unused = 0;
        for index in nodes {
            let node = self.node_mut(*index);
            node.uses -= 1;
            unused += usize::from(node.uses == 0);
        }
        self.idle += unused;
        self.repeated -= nodes.len() - unused;
        unused
    }

    /// Adds the full pages of a running text behind those of `held`, which the sequence uses, and counts its use of
    /// them. Ends at a page that is known already: the sequence keeps its own copy. Returns whether it added all. If
    /// `ids` are full pages, [`RadixTree::set_snapshot`] may add the snapshot to the last one.
    pub fn extend(&mut self, key: &Key, held: &mut Vec<NodeId>, ids: &[u32], state: &SharedState) -> bool {
        for i in held.len()..ids.len() / PAGE {
            let tokens = &ids[i * PAGE..][..PAGE];
            let above = held.last().map_or(Above::Root(*key), |last| Above::Node(*last));
            if self.best_of(self.below(&above), tokens).is_some_and(|(_, common)| common == PAGE) {
                return false;
            }
            let index = self.add(above, i, tokens, state);
            self.acquire(&[index]);
            held.push(index);
        }
        true
    }

    /// Adds the snapshot of a state after `tokens` tokens of a node, unless it has one. Returns the number of pages
    /// that it takes.
    pub fn set_snapshot(&mut self, index: NodeId, tokens: usize, state: &SharedState) -> usize {
        if self.snapshot_pages == 0 || self.node(index).state.snapshot(tokens).is_some() {
            return 0;
        }
        let node = self.node_mut(index);
        node.state.snapshots.push(Snapshot { tokens, parts: state.snapshots.clone() });
        // Files have the snapshot after the last token only.
        node.saved &= tokens < PAGE;
        self.snapshots += 1;
        self.snapshot_pages
    }

    /// Reports whether there is a snapshot after the last of `ids`, which begin with the full pages `held`.
    pub fn has_snapshot(&self, key: &Key, held: &[NodeId], ids: &[u32]) -> bool {
        let after = |index: NodeId, tokens: usize| self.node(index).state.snapshot(tokens).is_some();
        let above = held.last().map_or(Above::Root(*key), |last| Above::Node(*last));
        match &ids[held.len() * PAGE..] {
            [] => held.last().is_some_and(|last| after(*last, PAGE)),
            tail => self.known(&above, tail).is_some_and(|index| after(index, tail.len())),
        }
    }

    /// Counts the tokens of the full pages `nodes` behind the last snapshot among them.
    pub fn tokens_since_snapshot(&self, nodes: &[NodeId]) -> usize {
        let last = nodes.iter().rposition(|index| !self.node(*index).state.snapshots.is_empty());
        let known =
            last.and_then(|at| self.node(nodes[at]).state.snapshots.iter().map(|one| at * PAGE + one.tokens).max());
        nodes.len() * PAGE - known.unwrap_or(0)
    }

    /// Adds the last page of `ids`, which is not full, with its snapshot behind the full pages `held`. Of a known page
    /// that begins with it, or that it begins with, the snapshots stay. Returns the number of pages that this takes.
    pub fn add_tail(&mut self, key: &Key, held: &[NodeId], ids: &[u32], state: &SharedState) -> usize {
        let above = held.last().map_or(Above::Root(*key), |last| Above::Node(*last));
        let (i, tail) = (held.len(), &ids[held.len() * PAGE..]);
        if tail.is_empty() {
            return 0;
        }
        let (index, added) = match self.known(&above, tail) {
            Some(index) => {
                self.grow(index, i, tail, state);
                (index, 0)
            }
            None => (self.add(above, i, tail, state), 1),
        };
        self.touch(index);
        added + self.set_snapshot(index, tail.len(), state)
    }

    /// Finds the node behind `above` whose tokens begin with `tokens`, or with whose tokens they begin.
    fn known(&self, above: &Above, tokens: &[u32]) -> Option<NodeId> {
        let (index, common) = self.best_of(self.below(above), tokens)?;
        (common == tokens.len() || common == self.node(index).tokens.len()).then_some(index)
    }

    /// Replaces the page of a node by page `i` of a text if that begins with its tokens and has more. Returns whether
    /// it did.
    fn grow(&mut self, index: NodeId, i: usize, tokens: &[u32], state: &SharedState) -> bool {
        let node = self.node_mut(index);
        let grows = node.tokens.len() < tokens.len();
        if grows {
            node.tokens = tokens.to_vec();
            node.state.pages = pages_of(state, i);
            node.saved = false;
        }
        grows
    }

    /// Adds a text that ended, with its snapshot. Pages that are known already are not kept twice. Returns the number
    /// of pages that were added, and of those that pages with more tokens replaced.
    pub fn insert(&mut self, key: &Key, ids: &[u32], state: &SharedState) -> (usize, usize) {
        let (mut above, mut added, mut replaced) = (Above::Root(*key), 0, 0);
        let pages = ids.len().div_ceil(PAGE);
        for (i, tokens) in ids.chunks(PAGE).enumerate() {
            let index = match self.known(&above, tokens) {
                Some(index) => {
                    let grows = usize::from(self.grow(index, i, tokens, state));
                    (added, replaced) = (added + grows, replaced + grows);
                    index
                }
                None => {
                    added += 1;
                    self.add(above, i, tokens, state)
                }
            };
            if i + 1 == pages {
                added += self.set_snapshot(index, tokens.len(), state);
            }
            self.touch(index);
            above = Above::Node(index);
        }
        (added, replaced)
    }

    /// Adds the full page `i` of a text, which no sequence uses and which is on disk, behind the node of the page
    /// before it.
    pub fn restore(&mut self, key: &Key, before: Option<NodeId>, i: usize, tokens: &[u32], state: NodeState) -> NodeId {
        self.snapshots += state.snapshots.len();
        let index = self.add_node(before.map_or(Above::Root(*key), Above::Node), i, tokens, state);
        self.touch(index);
        self.set_saved(index);
        index
    }

    /// Notes that a full page was written to disk.
    pub fn set_saved(&mut self, index: NodeId) {
        self.node_mut(index).saved = true;
    }

    /// Calls `visit` with each full page. The page before comes first.
    ///
    /// # Errors
    /// Returns the first error of `visit`.
    pub fn visit_full<E>(
        &self,
        mut visit: impl FnMut(FullPage<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        for (key, first) in &self.roots {
            let mut open: Vec<(Option<NodeId>, NodeId)> = first.iter().map(|index| (None, *index)).collect();
            while let Some((before, index)) = open.pop() {
                let node = self.node(index);
                if node.tokens.len() == PAGE {
                    let (tokens, state, saved) = (&node.tokens[..], &node.state, node.saved);
                    visit(FullPage { key, node: index, before, tokens, state, saved })?;
                    open.extend(node.children.iter().map(|child| (Some(index), *child)));
                }
            }
        }
        Ok(())
    }

    /// Removes the unused leaf of the smallest value, or the snapshots of another node if its value is smaller. Returns
    /// the number of pages that this gives back; 0 if every node is used.
    pub fn evict(&mut self) -> usize {
        let nodes = self.nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?)));
        let unused = nodes.filter(|(_, node)| node.is_unused_leaf() || !node.state.snapshots.is_empty());
        let worst = unused.map(|(i, node)| (node.value, i)).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let Some((value, index)) = worst else { return 0 };
        self.clock = self.clock.max(value);
        let snapshots = self.drop_snapshots(index);
        if !self.node(index).is_unused_leaf() {
            return snapshots;
        }
        let node = self.nodes[index].take().expect("found above");
        match node.above {
            Above::Node(above) => self.node_mut(above).children.retain(|child| *child != index),
            Above::Root(key) => {
                if let Some(first) = self.roots.get_mut(&key) {
                    first.retain(|child| *child != index);
                    if first.is_empty() {
                        self.roots.remove(&key);
                    }
                }
            }
        }
        self.vacant.push(index);
        self.idle -= 1;
        1 + snapshots
    }

    /// Evicts until `pages` pages are given back or every node is used. Returns the number of pages given back.
    pub fn evict_pages(&mut self, pages: usize) -> usize {
        let mut given = 0;
        while given < pages
            && let more @ 1.. = self.evict()
        {
            given += more;
        }
        given
    }

    /// Drops the snapshots of a node. Returns the number of pages that this gives back.
    fn drop_snapshots(&mut self, index: NodeId) -> usize {
        let dropped = std::mem::take(&mut self.node_mut(index).state.snapshots).len();
        self.snapshots -= dropped;
        dropped * self.snapshot_pages
    }

    /// Counts the pages of each part that the tree holds, snapshots included.
    pub fn pages(&self) -> usize {
        self.nodes.len() - self.vacant.len() + self.snapshots * self.snapshot_pages
    }

    /// Counts the pages that no sequence uses, all snapshots included.
    pub fn idle(&self) -> usize {
        self.idle + self.snapshots * self.snapshot_pages
    }

    /// Counts the uses of nodes beyond the first of each.
    pub fn repeated(&self) -> usize {
        self.repeated
    }

    /// Returns the nodes below a node or root.
    fn below(&self, above: &Above) -> &[NodeId] {
        match above {
            Above::Root(key) => self.roots.get(key).map_or(&[][..], Vec::as_slice),
            Above::Node(index) => &self.node(*index).children,
        }
    }

    /// Returns the node of `among` with the longest common beginning with `ids`, and its length; `None` if no node has
    /// the first token.
    fn best_of(&self, among: &[NodeId], ids: &[u32]) -> Option<(NodeId, usize)> {
        let common = |index: NodeId| self.node(index).tokens.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let longest = among.iter().map(|index| (*index, common(*index))).max_by_key(|(_, common)| *common);
        longest.filter(|(_, common)| *common > 0)
    }

    /// Returns the node of `among` with the longest snapshot all of whose tokens `ids` begin with, and its length.
    fn longest_snapshot(&self, among: &[NodeId], ids: &[u32]) -> Option<(NodeId, usize)> {
        let snapshots = among.iter().flat_map(|index| {
            let node = self.node(*index);
            let known = node.state.snapshots.iter().map(|snapshot| snapshot.tokens);
            known.filter(|tokens| ids.starts_with(&node.tokens[..*tokens])).map(|tokens| (*index, tokens))
        });
        snapshots.max_by_key(|(_, tokens)| *tokens)
    }

    /// Adds a node that no sequence uses, for page `i` of a text.
    fn add(&mut self, above: Above, i: usize, tokens: &[u32], state: &SharedState) -> NodeId {
        self.add_node(above, i, tokens, NodeState { pages: pages_of(state, i), snapshots: Vec::new() })
    }

    fn add_node(&mut self, above: Above, i: usize, tokens: &[u32], state: NodeState) -> NodeId {
        let node = Node {
            tokens: tokens.to_vec(),
            state,
            above,
            children: Vec::new(),
            position: i * PAGE,
            value: 0.0,
            uses: 0,
            saved: false,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.nodes[index] = Some(node);
                index
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        };
        match above {
            Above::Root(key) => self.roots.entry(key).or_default().push(index),
            Above::Node(above) => self.node_mut(above).children.push(index),
        }
        self.idle += 1;
        index
    }

    /// Renews the value of a node that was used.
    fn touch(&mut self, index: NodeId) {
        let (clock, attention) = (self.clock, self.attention_cost);
        let node = self.node_mut(index);
        let count = node.tokens.len() as f64;
        node.value = clock + count * (1.0 + attention * (node.position as f64 + count / 2.0));
    }

    fn node(&self, index: NodeId) -> &Node {
        self.nodes[index].as_ref().expect("an index of a node that is there")
    }

    fn node_mut(&mut self, index: NodeId) -> &mut Node {
        self.nodes[index].as_mut().expect("an index of a node that is there")
    }
}

/// Returns page `i` of each part of a state.
fn pages_of(state: &SharedState, i: usize) -> Vec<Piece> {
    state.pages.iter().map(|pages| pages[i].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::{KvHeads, KvLayout, KvType, PagePool};
    use crate::runtime::state::StatePool;
    use std::sync::Arc;

    fn layout() -> KvLayout {
        KvLayout::new(KvType::F16, [KvHeads::new(1, 2)])
    }
    const KEY: Key = [1; 32];

    fn pages(pool: &Arc<PagePool>, tokens: usize) -> SharedState {
        let pages = (0..tokens.div_ceil(PAGE)).map(|_| pool.page().unwrap().piece()).collect();
        SharedState { pages: vec![pages], snapshots: vec![None] }
    }

    fn text(first: u32, len: usize) -> Vec<u32> {
        (0..len as u32).map(|i| first + i).collect()
    }

    #[test]
    fn the_longest_known_beginning_is_found_whatever_was_added() {
        let pool = PagePool::new(layout(), None).unwrap();
        let (mut tree, mut rng, mut texts) = (RadixTree::new(0.01, 0), Rng::new(5), Vec::<Vec<u32>>::new());
        for round in 0..300 {
            let mut text: Vec<u32> = match texts.is_empty() || round % 5 == 0 {
                true => Vec::new(),
                false => {
                    let one = &texts[rng.next_u64() as usize % texts.len()];
                    one[..rng.next_u64() as usize % (one.len() + 1)].to_vec()
                }
            };
            text.extend((0..1 + rng.next_u64() % 200).map(|_| (rng.next_u64() % 3) as u32));
            let common = |other: &Vec<u32>| other.iter().zip(&text).take_while(|(a, b)| a == b).count();
            let longest = texts.iter().map(common).max().unwrap_or(0);
            assert_eq!(tree.find(&KEY, &text).tokens, longest);
            assert_eq!(tree.find(&[2; 32], &text), Hit::default(), "another key");
            let before = tree.pages();
            let (added, replaced) = tree.insert(&KEY, &text, &pages(&pool, text.len()));
            assert_eq!(tree.pages(), before + added - replaced);
            let hit = tree.find(&KEY, &text);
            assert_eq!((hit.tokens, hit.nodes.len()), (text.len(), text.len().div_ceil(PAGE)));
            texts.push(text);
        }
        assert_eq!((pool.counts().used, tree.idle(), tree.repeated()), (tree.pages(), tree.pages(), 0));
        while tree.evict() > 0 {}
        assert_eq!((pool.counts().used, tree.pages()), (0, 0));
        assert!(tree.roots.is_empty());
    }

    #[test]
    fn the_cheapest_leaf_that_was_not_used_lately_leaves_first() {
        let pool = PagePool::new(layout(), None).unwrap();
        let mut tree = RadixTree::new(0.0, 0);
        let (short, old, used, in_use) = (text(1000, 10), text(2000, 100), text(3000, 100), text(4000, PAGE));
        let mut held = Vec::new();
        assert!(tree.extend(&KEY, &mut held, &in_use, &pages(&pool, PAGE)));
        for one in [&short, &old, &used] {
            tree.insert(&KEY, one, &pages(&pool, one.len()));
        }
        let left = |tree: &mut RadixTree| {
            assert_eq!(tree.evict(), 1);
            [&short, &old, &used].map(|one| tree.nodes.iter().flatten().any(|node| node.tokens == *one))
        };
        assert_eq!(left(&mut tree), [false, true, true], "the cheapest");
        let hit = tree.find(&KEY, &used);
        tree.acquire(&hit.nodes);
        tree.release(&hit.nodes);
        assert_eq!(left(&mut tree), [false, false, true], "the one that was not used lately");
        assert_eq!(left(&mut tree), [false, false, false]);
        assert_eq!(tree.evict(), 0, "a sequence uses the last one");
        tree.release(&held);
        assert_eq!((tree.evict(), tree.evict()), (1, 0));
    }

    #[test]
    fn uses_are_counted_for_each_sequence_and_known_pages_are_not_added_twice() {
        let pool = PagePool::new(layout(), None).unwrap();
        let mut tree = RadixTree::new(0.0, 0);
        let ids = text(0, 3 * PAGE + 10);
        let [mut first, mut second] = [Vec::new(), Vec::new()];
        assert!(tree.extend(&KEY, &mut first, &ids[..2 * PAGE], &pages(&pool, 2 * PAGE)));
        assert_eq!((first.len(), tree.idle(), tree.repeated()), (2, 0, 0));
        assert!(!tree.extend(&KEY, &mut second, &ids, &pages(&pool, ids.len())), "its own copy of a known page");
        assert!(second.is_empty());
        let hit = tree.find(&KEY, &ids);
        assert_eq!((hit.tokens, hit.full().len(), tree.idle_among(hit.full())), (2 * PAGE, 2, 0));
        tree.acquire(hit.full());
        assert_eq!(tree.repeated(), 2);
        assert!(tree.extend(&KEY, &mut first, &ids, &pages(&pool, ids.len())));
        assert_eq!(tree.add_tail(&KEY, &first, &ids, &pages(&pool, ids.len())), 1);
        assert_eq!(tree.add_tail(&KEY, &first, &ids, &pages(&pool, ids.len())), 0, "known");
        assert_eq!((tree.pages(), tree.idle()), (4, 1));
        assert_eq!(tree.insert(&KEY, &text(0, 3 * PAGE + 20), &pages(&pool, ids.len())), (1, 1));
        assert_eq!((tree.release(&first), tree.release(&hit.nodes)), (1, 2));
        assert_eq!((tree.idle(), tree.repeated()), (4, 0));
        assert_eq!(tree.state_of(&tree.find(&KEY, &ids)).pages[0].len(), 4);
    }

    #[derive(Debug)]
    struct Fixed;

    impl crate::runtime::state::PieceMemory for Fixed {
        fn bytes(&self) -> crate::error::Result<std::borrow::Cow<'_, [u8]>> {
            Ok((&[][..]).into())
        }
    }

    #[test]
    fn a_text_of_a_state_of_fixed_size_is_found_up_to_a_snapshot() {
        let pool = PagePool::new(layout(), None).unwrap();
        let with = |tokens: usize| {
            let snapshots = vec![Some(Piece::new(Arc::new(Fixed)))];
            SharedState { snapshots, ..pages(&pool, tokens) }
        };
        let mut tree = RadixTree::new(0.0, 3);
        let ids = text(0, 3 * PAGE + 10);
        let mut held = Vec::new();
        assert!(tree.extend(&KEY, &mut held, &ids[..2 * PAGE], &with(2 * PAGE)));
        assert_eq!((tree.find(&KEY, &ids).tokens, tree.find_pages(&KEY, &ids).len()), (0, 2));
        assert_eq!([0, 1].map(|_| tree.set_snapshot(held[1], PAGE, &with(2 * PAGE))), [3, 0]);
        assert_eq!((tree.tokens_since_snapshot(&held), tree.tokens_since_snapshot(&held[..1])), (0, PAGE));
        assert_eq!((tree.find(&KEY, &ids).tokens, tree.find(&KEY, &ids[..2 * PAGE - 1]).tokens), (2 * PAGE, 0));
        assert_eq!(tree.insert(&KEY, &ids, &with(ids.len())), (2 + 3, 0));
        assert_eq!((tree.find(&KEY, &text(0, 3 * PAGE + 40)).tokens, tree.pages(), tree.idle()), (ids.len(), 10, 8));
        // The text goes on: its last page grows, and a shorter text is still found up to the earlier snapshot.
        let longer = text(0, 3 * PAGE + 20);
        assert_eq!(tree.insert(&KEY, &longer, &with(longer.len())), (1 + 3, 1));
        assert_eq!((tree.find(&KEY, &ids).tokens, tree.find(&KEY, &longer).tokens), (ids.len(), longer.len()));
        let mut other = longer.clone();
        other.truncate(3 * PAGE + 15);
        other.extend([7; 40]);
        let hit = tree.find(&KEY, &other);
        assert_eq!((hit.tokens, hit.full().len(), tree.state_of(&hit).pages[0].len()), (ids.len(), 3, 4));
        assert!(tree.has_snapshot(&KEY, hit.full(), &ids) && !tree.has_snapshot(&KEY, hit.full(), &other));
        assert_eq!(tree.add_tail(&KEY, hit.full(), &longer[..3 * PAGE + 5], &with(4 * PAGE)), 3, "in a known page");
        assert_eq!(tree.add_tail(&KEY, hit.full(), &text(0, 3 * PAGE + 30), &with(4 * PAGE)), 3, "the page grows");
        assert_eq!(tree.pages(), 4 + 5 * 3);
        let hit = tree.find(&KEY, &longer);
        tree.acquire(hit.full());
        tree.release(&held);
        let (mut freed, all) = (0, tree.pages());
        while let pages @ 1.. = tree.evict() {
            freed += pages;
        }
        assert_eq!((all - freed, tree.pages(), tree.idle()), (3, 3, 0), "the pages that the second text uses stay");
    }
}
