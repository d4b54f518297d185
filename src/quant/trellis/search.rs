//! Search for the streams of a trellis: which indices give the values of a stream with the least error.
//!
//! The search is that of Viterbi. Neighbouring indices share bits; what a step shares with the next one is its *state*.
//! For each state of a step the best way to reach it is kept, so that a step extends as many ways as there are states,
//! each by all values of its oldest bits. A stream is a circle: the ways start in one state and must end there, for
//! each state in turn (with error feedback, for some).
//!
//! With error feedback ([`super::super::gptq`]), what a step should be depends on the errors before it. Each way
//! therefore keeps the targets of the steps to come (per-survivor processing). The result is good, not certainly the
//! best.
//!
//! Sixteen rows are searched at once, one per lane. The numbers of states and branches are not constants, because the
//! compiler would unroll the loops over them and then not keep the lanes in vectors.

use crate::quant::lanes::Lanes;
use crate::quant::plain::LANES;
use crate::scheme::{INDEX_BITS, STEPS, Trellis};
use crate::simd::{Kernel, Level, black_box};

/// Number of indices.
const INDICES: usize = 1 << INDEX_BITS;
/// Largest number of states: the bits that indices of 2 new bits share.
const STATES: usize = INDICES / 4;

/// Number of states in which ways with error feedback start. The most promising ones without feedback are tried. With
/// all states, the squared output errors of 14 matrices of a trained model are 1 % less, and the search takes two to
/// three times as long.
const TRIES: usize = 4;

/// Streams of sixteen rows.
pub(super) type Streams = [u32; LANES];

/// Streams to be chosen.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    /// Value of each step in units of the scale.
    pub values: &'a [Lanes; STEPS],
    /// Value of each step plus what compensates earlier errors, in units of the scale.
    pub targets: &'a [Lanes; STEPS],
    /// Weight of the squared error of each step.
    pub costs: &'a [f32; STEPS],
    /// Change of the target of a later step (column) per error of a step (row); `None` without error feedback.
    pub feedback: Option<&'a [[f32; STEPS]; STEPS]>,
}

/// Streams and their costs.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    pub streams: Streams,
    pub costs: Lanes,
}

impl Chosen {
    /// Keeps the streams that cost less; these ones of equals.
    pub fn keep(&mut self, other: &Chosen) {
        for lane in 0..LANES {
            if other.costs[lane] < self.costs[lane] {
                (self.streams[lane], self.costs[lane]) = (other.streams[lane], other.costs[lane]);
            }
        }
    }
}

/// Searches in one trellis, with its buffers.
pub(super) struct Search {
    level: Level,
    pub trellis: &'static Trellis,
    states: usize,
    branches: usize,
    /// Values of the indices.
    values: [f32; INDICES],
    /// Cost of each index at each step.
    distances: Box<[[Lanes; INDICES]; STEPS]>,
    /// Cost of the best way to each state.
    ways: Ways,
    next: Ways,
    /// Branch by which the best way reached each state at each step.
    branch: Box<[[Lanes; STATES]; STEPS]>,
}

/// The best way to each state.
struct Ways {
    costs: Vec<Lanes>,
    /// Targets `[step][state]`.
    targets: Vec<Lanes>,
}

impl Search {
    pub fn new(level: Level, trellis: &'static Trellis) -> Search {
        let states = INDICES >> trellis.bits;
        let lanes = |count: usize| vec![[0f32; LANES]; count];
        let ways = || Ways { costs: lanes(states), targets: lanes(STEPS * states) };
        Search {
            level,
            trellis,
            states,
            branches: 1 << trellis.bits,
            values: trellis.values.map(f32::from),
            distances: Box::new([[[0.0; LANES]; INDICES]; STEPS]),
            ways: ways(),
            next: ways(),
            branch: Box::new([[[0.0; LANES]; STATES]; STEPS]),
        }
    }

    /// Returns the best streams found.
    pub fn find(&mut self, wanted: &Wanted<'_>) -> Chosen {
        let Some(feedback) = wanted.feedback else {
            let (starts, _) = self.starts(wanted);
            self.begin(&starts);
            self.trace();
            return self.streams(&starts);
        };
        let mut costs = self.costs_through(wanted);
        let mut best = Chosen { streams: [0; LANES], costs: [f32::INFINITY; LANES] };
        for _ in 0..TRIES {
            let (starts, _) = least(&costs[..self.states]);
            (0..LANES).for_each(|lane| costs[starts[lane]][lane] = f32::INFINITY);
            self.begin(&starts);
            self.trace_with(wanted, feedback);
            best.keep(&self.streams(&starts));
        }
        best
    }

    /// Returns the least costs without error feedback.
    pub fn least_costs(&mut self, wanted: &Wanted<'_>) -> Lanes {
        self.starts(wanted).1
    }

    /// Returns the least costs without error feedback of streams that need not be circles. They are found several times
    /// as fast.
    pub fn least_costs_of_lines(&mut self, wanted: &Wanted<'_>) -> Lanes {
        self.measure(wanted);
        self.ways.costs.fill([0.0; LANES]);
        self.extend();
        least(&self.ways.costs).1
    }

    /// Returns the costs of given streams.
    pub fn costs_of(&self, wanted: &Wanted<'_>, streams: &Streams) -> Lanes {
        let (mut targets, mut costs) = (*wanted.targets, [0f32; LANES]);
        for step in 0..STEPS {
            let mut errors = [0f32; LANES];
            for lane in 0..LANES {
                let value = self.values[usize::from(self.trellis.index(streams[lane], step))];
                costs[lane] += wanted.costs[step] * (targets[step][lane] - value).powi(2);
                errors[lane] = wanted.values[step][lane] - value;
            }
            for later in step + 1..STEPS {
                let factor = wanted.feedback.map_or(0.0, |feedback| feedback[step][later]);
                (0..LANES).for_each(|lane| targets[later][lane] += factor * errors[lane]);
            }
        }
        costs
    }

    /// Returns the costs of the best stream without feedback that starts in each state.
    fn costs_of_starts(&mut self, wanted: &Wanted<'_>) -> [Lanes; STATES] {
        self.measure(wanted);
        let mut found = [[f32::INFINITY; LANES]; STATES];
        for start in 0..self.states {
            self.begin(&[start; LANES]);
            self.extend();
            found[start] = self.ways.costs[start];
        }
        found
    }

    /// Returns for each state the costs of the best two streams without feedback of which the first one ends in it and
    /// the second one starts in it, wherever they start and end.
    fn costs_through(&mut self, wanted: &Wanted<'_>) -> [Lanes; STATES] {
        let Search { level, states, branches, .. } = *self;
        self.measure(wanted);
        self.ways.costs.fill([0.0; LANES]);
        self.extend();
        let mut found = [[f32::INFINITY; LANES]; STATES];
        found[..states].copy_from_slice(&self.ways.costs);
        self.ways.costs.fill([0.0; LANES]);
        for distances in self.distances.iter().rev() {
            level.run(Precede { distances, costs: &self.ways.costs, previous: &mut self.next.costs, branches });
            std::mem::swap(&mut self.ways.costs, &mut self.next.costs);
        }
        for (found, costs) in found.iter_mut().zip(&self.ways.costs) {
            (0..LANES).for_each(|lane| found[lane] += costs[lane]);
        }
        found
    }

    /// Computes the cost of each index at each step.
    fn measure(&mut self, wanted: &Wanted<'_>) {
        for (step, distances) in self.distances.iter_mut().enumerate() {
            let (target, cost) = (&wanted.targets[step], wanted.costs[step]);
            self.level.run(Distances { values: &self.values, target, cost, distances });
        }
    }

    /// Walks all steps without error feedback.
    fn extend(&mut self) {
        for distances in self.distances.iter() {
            let (next, branches) = (&mut self.next.costs, self.branches);
            self.level.run(Extend { distances, costs: &self.ways.costs, next, branches });
            std::mem::swap(&mut self.ways.costs, &mut self.next.costs);
        }
    }

    /// Returns the state in which the best stream without feedback starts, and its costs.
    fn starts(&mut self, wanted: &Wanted<'_>) -> ([usize; LANES], Lanes) {
        least(&self.costs_of_starts(wanted)[..self.states])
    }

    /// Begins ways in one state each.
    fn begin(&mut self, starts: &[usize; LANES]) {
        self.ways.costs.fill([f32::INFINITY; LANES]);
        (0..LANES).for_each(|lane| self.ways.costs[starts[lane]][lane] = 0.0);
    }

    /// Walks all steps and notes the branches.
    fn trace(&mut self) {
        for (distances, branch) in self.distances.iter().zip(self.branch.iter_mut()) {
            let (next, branches) = (&mut self.next.costs, self.branches);
            self.level.run(Trace { distances, costs: &self.ways.costs, next, branch, branches });
            std::mem::swap(&mut self.ways.costs, &mut self.next.costs);
        }
    }

    /// Walks all steps with error feedback and notes the branches.
    fn trace_with(&mut self, wanted: &Wanted<'_>, feedback: &[[f32; STEPS]; STEPS]) {
        let Search { level, states, branches, .. } = *self;
        for (targets, target) in self.ways.targets.chunks_exact_mut(states).zip(wanted.targets) {
            targets.fill(*target);
        }
        for step in 0..STEPS {
            let branch = &mut self.branch[step];
            let mut values = [[0f32; LANES]; STATES];
            level.run(Follow {
                values: &self.values,
                targets: &self.ways.targets[step * states..],
                cost: wanted.costs[step],
                costs: &self.ways.costs,
                next: &mut self.next.costs,
                branch,
                reached: &mut values,
                branches,
            });
            for later in step + 1..STEPS {
                level.run(Carry {
                    targets: &self.ways.targets[later * states..],
                    next: &mut self.next.targets[later * states..][..states],
                    branch,
                    wanted: &wanted.values[step],
                    reached: &values,
                    feedback: feedback[step][later],
                    branches,
                });
            }
            std::mem::swap(&mut self.ways, &mut self.next);
        }
    }

    /// Returns the streams of the ways that ended in the states in which they started.
    fn streams(&self, starts: &[usize; LANES]) -> Chosen {
        let mut found = Chosen { streams: [0; LANES], costs: [0.0; LANES] };
        for lane in 0..LANES {
            let mut state = starts[lane];
            found.costs[lane] = self.ways.costs[state][lane];
            for step in (0..STEPS).rev() {
                let oldest = self.branch[step][state][lane] as usize;
                found.streams[lane] |= (oldest as u32) << (self.trellis.bits as usize * step);
                state = (state << self.trellis.bits | oldest) & (self.states - 1);
            }
        }
        found
    }
}

/// Returns the state with the least costs, the first one of equals, and these costs.
fn least(costs: &[Lanes]) -> ([usize; LANES], Lanes) {
    let (mut starts, mut least) = ([0; LANES], [f32::INFINITY; LANES]);
    for (start, costs) in costs.iter().enumerate() {
        for lane in 0..LANES {
            if costs[lane] < least[lane] {
                (starts[lane], least[lane]) = (start, costs[lane]);
            }
        }
    }
    (starts, least)
}

/// Returns the first of the states from which the branches to a state come. Indices that lead to a state have its bits
/// above their oldest ones, which tell the branches apart.
#[inline(always)]
fn first_from(to: usize, branches: usize) -> usize {
    (to * branches) & (INDICES / branches - 1)
}

/// Kernel that computes the cost of each index at a step.
struct Distances<'a> {
    values: &'a [f32],
    target: &'a Lanes,
    cost: f32,
    distances: &'a mut [Lanes],
}

impl Kernel for Distances<'_> {
    #[inline(always)]
    fn run(self) {
        for (value, distance) in self.values.iter().zip(self.distances) {
            let mut costs = [0f32; LANES];
            for lane in 0..LANES {
                let error = self.target[lane] - *value;
                costs[lane] = error * self.cost * error;
            }
            *distance = black_box(costs);
        }
    }
}

/// Kernel that computes the least cost of each state after a step.
struct Extend<'a> {
    distances: &'a [Lanes],
    costs: &'a [Lanes],
    next: &'a mut [Lanes],
    branches: usize,
}

impl Kernel for Extend<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, next) in self.next.iter_mut().enumerate() {
            let distances = &self.distances[to * self.branches..][..self.branches];
            let costs = &self.costs[first_from(to, self.branches)..][..self.branches];
            let mut best = [f32::INFINITY; LANES];
            for i in 0..self.branches {
                for lane in 0..LANES {
                    let cost = costs[i][lane] + distances[i][lane];
                    best[lane] = if cost < best[lane] { cost } else { best[lane] };
                }
            }
            *next = best;
        }
    }
}

/// Kernel that computes the least cost from each state before a step to the end of the stream.
struct Precede<'a> {
    distances: &'a [Lanes],
    costs: &'a [Lanes],
    previous: &'a mut [Lanes],
    branches: usize,
}

impl Kernel for Precede<'_> {
    #[inline(always)]
    fn run(self) {
        self.previous.fill([f32::INFINITY; LANES]);
        for (to, costs) in self.costs.iter().enumerate() {
            let distances = &self.distances[to * self.branches..][..self.branches];
            let previous = &mut self.previous[first_from(to, self.branches)..][..self.branches];
            for i in 0..self.branches {
                for lane in 0..LANES {
                    let cost = costs[lane] + distances[i][lane];
                    previous[i][lane] = if cost < previous[i][lane] { cost } else { previous[i][lane] };
                }
            }
        }
    }
}

/// Kernel that extends like [`Extend`] and notes the branches; the first one of equals.
struct Trace<'a> {
    distances: &'a [Lanes],
    costs: &'a [Lanes],
    next: &'a mut [Lanes],
    branch: &'a mut [Lanes],
    branches: usize,
}

impl Kernel for Trace<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, next) in self.next.iter_mut().enumerate() {
            let distances = &self.distances[to * self.branches..][..self.branches];
            let costs = &self.costs[first_from(to, self.branches)..][..self.branches];
            let (mut best, mut branch) = ([f32::INFINITY; LANES], [0f32; LANES]);
            for i in 0..self.branches {
                let number = i as f32;
                for lane in 0..LANES {
                    let cost = costs[i][lane] + distances[i][lane];
                    let better = cost < best[lane];
                    best[lane] = if better { cost } else { best[lane] };
                    branch[lane] = if better { number } else { branch[lane] };
                }
            }
            (*next, self.branch[to]) = (best, branch);
        }
    }
}

/// Kernel that extends like [`Trace`], where the targets of the step differ from way to way, and notes the values that
/// were reached, too.
struct Follow<'a> {
    values: &'a [f32],
    targets: &'a [Lanes],
    cost: f32,
    costs: &'a [Lanes],
    next: &'a mut [Lanes],
    branch: &'a mut [Lanes],
    reached: &'a mut [Lanes],
    branches: usize,
}

impl Kernel for Follow<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, next) in self.next.iter_mut().enumerate() {
            let first = first_from(to, self.branches);
            let values = &self.values[to * self.branches..][..self.branches];
            let costs = &self.costs[first..][..self.branches];
            let targets = &self.targets[first..][..self.branches];
            let (mut best, mut branch, mut reached) = ([f32::INFINITY; LANES], [0f32; LANES], [0f32; LANES]);
            for i in 0..self.branches {
                let (number, value) = (i as f32, values[i]);
                for lane in 0..LANES {
                    let error = targets[i][lane] - value;
                    let cost = (error * self.cost).mul_add(error, costs[i][lane]);
                    let better = cost < best[lane];
                    best[lane] = if better { cost } else { best[lane] };
                    branch[lane] = if better { number } else { branch[lane] };
                    reached[lane] = if better { value } else { reached[lane] };
                }
            }
            (*next, self.branch[to], self.reached[to]) = (best, branch, reached);
        }
    }
}

/// Kernel that takes the targets of a later step along the branches, and adds what the errors of this step change.
struct Carry<'a> {
    targets: &'a [Lanes],
    next: &'a mut [Lanes],
    branch: &'a [Lanes],
    wanted: &'a Lanes,
    reached: &'a [Lanes],
    feedback: f32,
    branches: usize,
}

impl Kernel for Carry<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, next) in self.next.iter_mut().enumerate() {
            let targets = &self.targets[first_from(to, self.branches)..][..self.branches];
            let (branch, reached) = (&self.branch[to], &self.reached[to]);
            let mut carried = [0f32; LANES];
            for i in 0..self.branches {
                // Loaded before the comparison, which then needs no branches.
                let (number, targets) = (i as f32, targets[i]);
                for lane in 0..LANES {
                    let taken = targets[lane];
                    carried[lane] = if branch[lane] == number { taken } else { carried[lane] };
                }
            }
            for lane in 0..LANES {
                let error = self.wanted[lane] - reached[lane];
                carried[lane] = self.feedback.mul_add(error, carried[lane]);
            }
            *next = black_box(carried);
        }
    }
}
