//! Radix tree of the prefix cache: finds the pages of the longest known beginning of a text.
//!
//! A node holds the tokens of one page and a reference to the page, one per part of the model; its children are the
//! known continuations. Only full pages have children. A search compares tokens, so it may end within a page, whose
//! remaining positions are then not used. Trees of different keys share nothing.
//!
//! When memory is needed, the leaf of the smallest value leaves. The value of a node is the cost of computing it again
//! plus the value of the last node that left when this one was last used (the GreedyDual rule): among nodes of equal
//! cost the least recently used one leaves first, and a node of twice the cost stays about twice as long.

use super::kv::{PAGE, Page};
use std::collections::HashMap;

/// Digest of everything but the tokens that keys and values depend on.
pub type Key = [u8; 32];

/// Known beginnings of texts with their pages.
#[derive(Debug, Default)]
pub struct RadixTree {
    /// Nodes by index; `None` = removed.
    nodes: Vec<Option<Node>>,
    /// Indices of removed nodes.
    vacant: Vec<usize>,
    /// First nodes of the texts of each key.
    roots: HashMap<Key, Vec<usize>>,
    /// Value of the node that left last.
    clock: f64,
    /// Cost of attention to one position, in units of the cost of a token's products.
    attention_cost: f64,
}

#[derive(Debug)]
struct Node {
    /// Tokens of the page: 1 to [`PAGE`].
    tokens: Vec<u32>,
    /// Page of each part.
    pages: Vec<Page>,
    above: Above,
    children: Vec<usize>,
    /// Position of the first token.
    position: usize,
    value: f64,
}

/// Predecessor of a node.
#[derive(Debug, Clone, Copy)]
enum Above {
    Root(Key),
    Node(usize),
}

/// The longest known beginning of a text.
#[derive(Debug)]
pub struct Hit {
    /// Number of tokens.
    pub tokens: usize,
    /// Pages of each part, the last of which may hold more positions than `tokens`.
    pub parts: Vec<Vec<Page>>,
}

impl RadixTree {
    /// Creates an empty tree. `attention_cost` is the cost of attention to one position, relative to that of a token's
    /// products.
    pub fn new(attention_cost: f64) -> RadixTree {
        RadixTree { attention_cost, ..RadixTree::default() }
    }

    /// Finds the longest known beginning of `ids`.
    pub fn find(&mut self, key: &Key, ids: &[u32]) -> Option<Hit> {
        let mut hit: Option<Hit> = None;
        let mut next = self.roots.get(key).map_or(&[][..], Vec::as_slice);
        let mut read = 0;
        let mut path = Vec::new();
        while let Some((index, common)) = self.best_of(next, &ids[read..]) {
            let node = self.node(index);
            let hit = hit.get_or_insert_with(|| Hit { tokens: 0, parts: vec![Vec::new(); node.pages.len()] });
            hit.parts.iter_mut().zip(&node.pages).for_each(|(pages, page)| pages.push(page.clone()));
            read += common;
            hit.tokens = read;
            path.push(index);
            if common < PAGE {
                break;
            }
            next = &node.children;
        }
        path.into_iter().for_each(|index| self.touch(index));
        hit
    }

    /// Adds a text, whose pages are given for each part. Pages of tokens that are known already are not kept twice.
    pub fn insert(&mut self, key: &Key, ids: &[u32], parts: &[&[Page]]) {
        let mut above = Above::Root(*key);
        for (i, tokens) in ids.chunks(PAGE).enumerate() {
            let siblings = match above {
                Above::Root(key) => self.roots.get(&key).map_or(&[][..], Vec::as_slice),
                Above::Node(index) => &self.node(index).children[..],
            };
            let pages = || parts.iter().map(|pages| pages[i].clone()).collect::<Vec<_>>();
            let known = self
                .best_of(siblings, tokens)
                .filter(|(index, common)| *common == tokens.len() || *common == self.node(*index).tokens.len());
            let index = match known {
                Some((index, common)) => {
                    if common < tokens.len() {
                        let pages = pages();
                        let node = self.node_mut(index);
                        node.tokens = tokens.to_vec();
                        node.pages = pages;
                    }
                    index
                }
                None => self.add(Node {
                    tokens: tokens.to_vec(),
                    pages: pages(),
                    above,
                    children: Vec::new(),
                    position: i * PAGE,
                    value: 0.0,
                }),
            };
            self.touch(index);
            above = Above::Node(index);
        }
    }

    /// Removes the leaf of the smallest value; returns false if the tree is empty. Leaves whose pages no sequence uses
    /// go first, because only they give memory back at once.
    pub fn evict(&mut self) -> bool {
        let leaves = self.nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?)));
        let worst = leaves
            .filter(|(_, node)| node.children.is_empty())
            .map(|(i, node)| (node.pages.iter().any(Page::is_shared), node.value, i))
            .min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        let Some((_, value, index)) = worst else { return false };
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
        true
    }

    /// Returns the number of pages in the tree.
    pub fn pages(&self) -> usize {
        self.nodes.iter().flatten().map(|node| node.pages.len()).sum()
    }

    /// Returns the number of pages of part `part` that belong to the tree alone.
    pub fn own_pages(&self, part: usize) -> usize {
        self.nodes.iter().flatten().filter(|node| node.pages.get(part).is_some_and(|page| !page.is_shared())).count()
    }

    /// Returns the node of `among` with the longest common beginning with `ids`, and its length; `None` if no node has
    /// the first token.
    fn best_of(&self, among: &[usize], ids: &[u32]) -> Option<(usize, usize)> {
        let common = |index: usize| self.node(index).tokens.iter().zip(ids).take_while(|(a, b)| a == b).count();
        let longest = among.iter().map(|index| (*index, common(*index))).max_by_key(|(_, common)| *common);
        longest.filter(|(_, common)| *common > 0)
    }

    fn add(&mut self, node: Node) -> usize {
        let above = node.above;
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
        index
    }

    /// Renews the value of a node that was used.
    fn touch(&mut self, index: usize) {
        let (clock, attention) = (self.clock, self.attention_cost);
        let node = self.node_mut(index);
        let count = node.tokens.len() as f64;
        node.value = clock + count * (1.0 + attention * (node.position as f64 + count / 2.0));
    }

    fn node(&self, index: usize) -> &Node {
        self.nodes[index].as_ref().expect("an index of a node that is there")
    }

    fn node_mut(&mut self, index: usize) -> &mut Node {
        self.nodes[index].as_mut().expect("an index of a node that is there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::{KvCache, KvLayout, KvType, PagePool};
    use std::sync::Arc;

    const LAYOUT: KvLayout = KvLayout { layers: 1, kv_heads: 1, head_dim: 2, kind: KvType::F16 };
    const KEY: Key = [1; 32];

    fn pages(pool: &Arc<PagePool>, tokens: usize) -> Vec<Page> {
        (0..tokens.div_ceil(PAGE)).map(|_| pool.page().unwrap()).collect()
    }

    fn found(tree: &mut RadixTree, key: &Key, ids: &[u32]) -> usize {
        let hit = tree.find(key, ids);
        hit.map_or(0, |hit| {
            assert_eq!(hit.parts[0].len(), hit.tokens.div_ceil(PAGE));
            hit.tokens
        })
    }

    #[test]
    fn the_longest_known_beginning_is_found_whatever_was_added() {
        let pool = PagePool::new(LAYOUT, None).unwrap();
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
            assert_eq!(found(&mut tree, &KEY, &text), longest);
            assert_eq!(found(&mut tree, &[2; 32], &text), 0, "another key");
            tree.insert(&KEY, &text, &[&pages(&pool, text.len())]);
            assert_eq!(found(&mut tree, &KEY, &text), text.len());
            texts.push(text);
        }
        let counts = pool.counts(tree.own_pages(0));
        assert_eq!((counts.used, counts.cached), (0, tree.pages()));
        while tree.evict() {}
        assert_eq!((pool.counts(0).used, tree.pages()), (0, 0));
        assert!(tree.roots.is_empty());
    }

    #[test]
    fn the_cheapest_leaf_that_was_not_used_lately_leaves_first() {
        let pool = PagePool::new(LAYOUT, None).unwrap();
        let mut tree = RadixTree::new(0.0);
        let text = |first: u32, len: usize| (0..len as u32).map(|i| first + i).collect::<Vec<_>>();
        let (short, old, used) = (text(1000, 10), text(2000, 100), text(3000, 100));
        let in_use = pages(&pool, 5);
        tree.insert(&KEY, &text(4000, 5), &[&in_use]);
        for one in [&short, &old, &used] {
            tree.insert(&KEY, one, &[&pages(&pool, one.len())]);
        }
        let left = |tree: &mut RadixTree| {
            assert!(tree.evict());
            [&short, &old, &used].map(|one| tree.nodes.iter().flatten().any(|node| node.tokens == *one))
        };
        assert_eq!(left(&mut tree), [false, true, true], "the cheapest, not the one that a sequence uses");
        assert!(found(&mut tree, &KEY, &used) == 100);
        assert_eq!(left(&mut tree), [false, false, true], "the one that was not used lately");
        assert_eq!(left(&mut tree), [false, false, false]);
        assert!(tree.evict() && !tree.evict());
    }

    #[test]
    fn pages_of_the_tree_are_copied_before_a_sequence_writes_to_them() {
        let pool = PagePool::new(LAYOUT, Some(LAYOUT.bytes(PAGE) * 2)).unwrap();
        let (mut tree, mut cache) = (RadixTree::new(0.0), KvCache::new(&pool));
        cache.grow(3).unwrap();
        tree.insert(&KEY, &[1, 2, 3], &[cache.pages()]);
        cache.grow(1).unwrap();
        assert_eq!((pool.counts(tree.own_pages(0)).used, tree.own_pages(0)), (1, 1));
    }
}
