//! Radix tree of the prefix cache: finds the pages of the longest known beginning of a text.
//!
//! A node holds the tokens of one page and a reference to the page, one per part of the model; its children are the
//! known continuations. Only full pages have children. A search compares tokens, so it may end within a page, whose
//! remaining positions are then not used. Trees of different keys share nothing.
//!
//! A sequence uses the nodes of its full pages from the root on, so no used node lies below an unused one. When memory
//! is needed, the unused leaf of the smallest value leaves. The value of a node is the cost of computing it again plus
//! the value of the last node that left when this one was last used (the GreedyDual rule): among nodes of equal cost
//! the least recently used one leaves first, and a node of twice the cost stays about twice as long.

use crate::runtime::kv::{PAGE, Page};
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
    /// Number of nodes that no sequence uses.
    idle: usize,
    /// Uses of nodes beyond the first of each.
    repeated: usize,
}

#[derive(Debug)]
struct Node {
    /// Tokens of the page: 1 to [`PAGE`].
    tokens: Vec<u32>,
    /// Page of each part.
    pages: Vec<Page>,
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

/// Predecessor of a node.
#[derive(Debug, Clone, Copy)]
enum Above {
    Root(Key),
    Node(NodeId),
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
    /// Page of each part.
    pub parts: &'a [Page],
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
    /// products.
    pub fn new(attention_cost: f64) -> RadixTree {
        RadixTree { attention_cost, ..RadixTree::default() }
    }

    /// Finds the longest known beginning of `ids`.
    pub fn find(&self, key: &Key, ids: &[u32]) -> Hit {
        let mut hit = Hit::default();
        let mut next = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        while let Some((index, common)) = self.best_of(next, &ids[hit.tokens..]) {
            hit.tokens += common;
            hit.nodes.push(index);
            if common < PAGE {
                break;
            }
            next = &self.node(index).children;
        }
        hit
    }

    /// Returns the pages of nodes for each part.
    pub fn pages_of(&self, nodes: &[NodeId]) -> Vec<Vec<Page>> {
        let parts = nodes.first().map_or(0, |first| self.node(*first).pages.len());
        let part = |part: usize| nodes.iter().map(|index| self.node(*index).pages[part].clone()).collect();
        (0..parts).map(part).collect()
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
    /// them. Ends at a page that is known already: the sequence keeps its own copy. Returns whether it added all.
    pub fn extend(&mut self, key: &Key, held: &mut Vec<NodeId>, ids: &[u32], parts: &[Vec<Page>]) -> bool {
        for i in held.len()..ids.len() / PAGE {
            let tokens = &ids[i * PAGE..][..PAGE];
            let above = held.last().map_or(Above::Root(*key), |last| Above::Node(*last));
            if self.best_of(self.below(&above), tokens).is_some_and(|(_, common)| common == PAGE) {
                return false;
            }
            let index = self.add(above, i, tokens, parts);
            self.acquire(&[index]);
            held.push(index);
        }
        true
    }

    /// Adds the last page of `ids`, which is not full, behind the full pages `held`. Returns false if a known page
    /// begins with it or it begins with a known page.
    pub fn add_tail(&mut self, key: &Key, held: &[NodeId], ids: &[u32], parts: &[Vec<Page>]) -> bool {
        let above = held.last().map_or(Above::Root(*key), |last| Above::Node(*last));
        let tail = &ids[held.len() * PAGE..];
        let covers = |(index, common): (NodeId, usize)| common == tail.len() || common == self.node(index).tokens.len();
        if tail.is_empty() || self.best_of(self.below(&above), tail).is_some_and(covers) {
            return false;
        }
        let index = self.add(above, held.len(), tail, parts);
        self.touch(index);
        true
    }

    /// Adds a text that ended. Pages that are known already are not kept twice. Returns the number of nodes that it
    /// added, and of those whose page it replaced by a page with more tokens.
    pub fn insert(&mut self, key: &Key, ids: &[u32], parts: &[Vec<Page>]) -> (usize, usize) {
        let (mut above, mut added, mut replaced) = (Above::Root(*key), 0, 0);
        for (i, tokens) in ids.chunks(PAGE).enumerate() {
            let known = self
                .best_of(self.below(&above), tokens)
                .filter(|(index, common)| *common == tokens.len() || *common == self.node(*index).tokens.len());
            let index = match known {
                Some((index, common)) => {
                    if common < tokens.len() {
                        let node = self.node_mut(index);
                        node.tokens = tokens.to_vec();
                        node.pages = parts.iter().map(|pages| pages[i].clone()).collect();
                        node.saved = false;
                        replaced += 1;
                    }
                    index
                }
                None => {
                    added += 1;
                    self.add(above, i, tokens, parts)
                }
            };
            self.touch(index);
            above = Above::Node(index);
        }
        (added, replaced)
    }

    /// Adds the full page `i` of a text, which no sequence uses and which is on disk, behind the node of the page
    /// before it.
    pub fn restore(&mut self, key: &Key, before: Option<NodeId>, i: usize, tokens: &[u32], pages: Vec<Page>) -> NodeId {
        let index = self.add_node(before.map_or(Above::Root(*key), Above::Node), i, tokens, pages);
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
                    let (tokens, parts, saved) = (&node.tokens[..], &node.pages[..], node.saved);
                    visit(FullPage { key, node: index, before, tokens, parts, saved })?;
                    open.extend(node.children.iter().map(|child| (Some(index), *child)));
                }
            }
        }
        Ok(())
    }

    /// Removes the unused leaf of the smallest value; returns false if every node is used.
    pub fn evict(&mut self) -> bool {
        let nodes = self.nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?)));
        let leaves = nodes.filter(|(_, node)| node.children.is_empty() && node.uses == 0);
        let worst = leaves.map(|(i, node)| (node.value, i)).min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let Some((value, index)) = worst else { return false };
        self.clock = self.clock.max(value);
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
        true
    }

    /// Returns the number of nodes, which is the number of pages of each part.
    pub fn len(&self) -> usize {
        self.nodes.len() - self.vacant.len()
    }

    /// Counts the nodes that no sequence uses.
    pub fn idle(&self) -> usize {
        self.idle
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

    /// Adds a node that no sequence uses, for page `i` of a text.
    fn add(&mut self, above: Above, i: usize, tokens: &[u32], parts: &[Vec<Page>]) -> NodeId {
        self.add_node(above, i, tokens, parts.iter().map(|pages| pages[i].clone()).collect())
    }

    fn add_node(&mut self, above: Above, i: usize, tokens: &[u32], pages: Vec<Page>) -> NodeId {
        let node = Node {
            tokens: tokens.to_vec(),
            pages,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::{KvHeads, KvLayout, KvType, PagePool};
    use std::sync::Arc;

    fn layout() -> KvLayout {
        KvLayout::new(KvType::F16, [KvHeads::new(1, 2)])
    }
    const KEY: Key = [1; 32];

    fn pages(pool: &Arc<PagePool>, tokens: usize) -> Vec<Vec<Page>> {
        vec![(0..tokens.div_ceil(PAGE)).map(|_| pool.page().unwrap()).collect()]
    }

    fn text(first: u32, len: usize) -> Vec<u32> {
        (0..len as u32).map(|i| first + i).collect()
    }

    #[test]
    fn the_longest_known_beginning_is_found_whatever_was_added() {
        let pool = PagePool::new(layout(), None).unwrap();
        let (mut tree, mut rng, mut texts) = (RadixTree::new(0.01), Rng::new(5), Vec::<Vec<u32>>::new());
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
            let before = tree.len();
            let (added, _) = tree.insert(&KEY, &text, &pages(&pool, text.len()));
            assert_eq!(tree.len(), before + added);
            let hit = tree.find(&KEY, &text);
            assert_eq!((hit.tokens, hit.nodes.len()), (text.len(), text.len().div_ceil(PAGE)));
            texts.push(text);
        }
        assert_eq!((pool.counts(0).used, tree.idle(), tree.repeated()), (tree.len(), tree.len(), 0));
        while tree.evict() {}
        assert_eq!((pool.counts(0).used, tree.len()), (0, 0));
        assert!(tree.roots.is_empty());
    }

    #[test]
    fn the_cheapest_leaf_that_was_not_used_lately_leaves_first() {
        let pool = PagePool::new(layout(), None).unwrap();
        let mut tree = RadixTree::new(0.0);
        let (short, old, used, in_use) = (text(1000, 10), text(2000, 100), text(3000, 100), text(4000, PAGE));
        let mut held = Vec::new();
        assert!(tree.extend(&KEY, &mut held, &in_use, &pages(&pool, PAGE)));
        for one in [&short, &old, &used] {
            tree.insert(&KEY, one, &pages(&pool, one.len()));
        }
        let left = |tree: &mut RadixTree| {
            assert!(tree.evict());
            [&short, &old, &used].map(|one| tree.nodes.iter().flatten().any(|node| node.tokens == *one))
        };
        assert_eq!(left(&mut tree), [false, true, true], "the cheapest");
        let hit = tree.find(&KEY, &used);
        tree.acquire(&hit.nodes);
        tree.release(&hit.nodes);
        assert_eq!(left(&mut tree), [false, false, true], "the one that was not used lately");
        assert_eq!(left(&mut tree), [false, false, false]);
        assert!(!tree.evict(), "a sequence uses the last one");
        tree.release(&held);
        assert!(tree.evict() && !tree.evict());
    }

    #[test]
    fn uses_are_counted_for_each_sequence_and_known_pages_are_not_added_twice() {
        let pool = PagePool::new(layout(), None).unwrap();
        let mut tree = RadixTree::new(0.0);
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
        assert!(tree.add_tail(&KEY, &first, &ids, &pages(&pool, ids.len())));
        assert!(!tree.add_tail(&KEY, &first, &ids, &pages(&pool, ids.len())), "known");
        assert_eq!((tree.len(), tree.idle()), (4, 1));
        assert_eq!(tree.insert(&KEY, &text(0, 3 * PAGE + 20), &pages(&pool, ids.len())), (0, 1));
        assert_eq!((tree.release(&first), tree.release(&hit.nodes)), (1, 2));
        assert_eq!((tree.idle(), tree.repeated()), (4, 0));
        assert_eq!(tree.pages_of(&tree.find(&KEY, &ids).nodes)[0].len(), 4);
    }
}
