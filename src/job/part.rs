//! Parts of a job that run on different machines: `2/8` is the second of eight parts. Tasks are distributed to parts by
//! their cost. Every part computes the same distribution from the same tasks, so parts need no communication.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::str::FromStr;

/// Largest number of parts.
const MOST: usize = 100_000;

/// One part of a job; numbers start at 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Part {
    /// Number of this part, 1 to `count`.
    pub number: usize,
    /// Number of all parts.
    pub count: usize,
}

impl Part {
    /// Returns part `number` of `count`.
    ///
    /// # Errors
    /// `number` is not in 1 to `count`, or `count` is not in 1 to 100000.
    pub fn new(number: usize, count: usize) -> Result<Part> {
        if !(1..=MOST).contains(&count) || !(1..=count).contains(&number) {
            return Err(Error::usage(format!(
                "found part {number}/{count}, expected K/N with K from 1 to N, and N at most {MOST}"
            )));
        }
        Ok(Part { number, count })
    }

    /// Returns the part that a job array assigned to this process, from `SLURM_ARRAY_TASK_ID` (Slurm) or
    /// `JOB_COMPLETION_INDEX` (an Indexed Job of Kubernetes). `count` is the number of parts; without it, the size of
    /// the array from Slurm (`SLURM_ARRAY_TASK_COUNT`) or from the manifest of the Kubernetes Job (`JOB_COMPLETIONS`).
    ///
    /// # Errors
    /// The variables of neither scheduler or of both are set, a number cannot be read, or the array does not fit
    /// `count`.
    pub fn from_scheduler(count: Option<usize>, variable: impl Fn(&str) -> Option<String>) -> Result<Part> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = variable(name).filter(|text| !text.is_empty()) else { return Ok(None) };
            text.parse().map(Some).map_err(|_| Error::usage(format!("{name}: found `{text}`, expected a number")))
        };
        let no_count = |name: &str| Error::usage(format!("--parts auto: {name} is not set")).help("give --parts N");
        match (number("SLURM_ARRAY_TASK_ID")?, number("JOB_COMPLETION_INDEX")?) {
            (Some(id), None) => {
                let (first, tasks) = (number("SLURM_ARRAY_TASK_MIN")?, number("SLURM_ARRAY_TASK_COUNT")?);
                let count = count.or(tasks).ok_or_else(|| no_count("SLURM_ARRAY_TASK_COUNT"))?;
                // In a complete array that starts at 0, the number of a part is the task ID + 1. In any other array,
                // such as one that repeats some tasks, it is the task ID itself.
                let from_zero = first == Some(0) && tasks == Some(count);
                in_array(id.saturating_add(usize::from(from_zero)), count, || format!("SLURM_ARRAY_TASK_ID={id}"))
            }
            (None, Some(index)) => {
                let count = match count {
                    Some(count) => count,
                    None => number("JOB_COMPLETIONS")?.ok_or_else(|| no_count("JOB_COMPLETIONS"))?,
                };
                in_array(index.saturating_add(1), count, || format!("JOB_COMPLETION_INDEX={index}"))
            }
            (None, None) => Err(Error::usage("--parts: neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set")
                .help("outside a job array, give the part itself, such as --part 1/4")),
            (Some(_), Some(_)) => {
                Err(Error::usage("both SLURM_ARRAY_TASK_ID and JOB_COMPLETION_INDEX are set").help("give --part K/N"))
            }
        }
    }
}

fn in_array(number: usize, count: usize, said: impl Fn() -> String) -> Result<Part> {
    Part::new(number, count).map_err(|_| {
        Error::usage(format!("{} is outside the {count} parts", said()))
            .help("number the array 1-N (Slurm) or 0 to N-1 (Kubernetes), or give --part K/N")
    })
}

impl FromStr for Part {
    type Err = Error;

    fn from_str(text: &str) -> Result<Part> {
        let numbers = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match numbers {
            Some((number, count)) => Part::new(number, count),
            None => Err(Error::usage(format!("found `{text}`, expected K/N, as in 2/8"))),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.count)
    }
}

/// Distributes tasks over `count` parts: the task of the highest cost first, each to the part with the smallest total
/// cost so far. `weights` holds the cost of each task. Returns the number of the part of each task.
pub fn deal(weights: &[u64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|task| (Reverse(weights[*task]), *task));
    let mut parts: BinaryHeap<Reverse<(u64, usize)>> = (1..=count).map(|number| Reverse((0, number))).collect();
    let mut of = vec![0; weights.len()];
    for task in order {
        let Some(Reverse((load, number))) = parts.pop() else { break };
        of[task] = number;
        parts.push(Reverse((load.saturating_add(weights[task]), number)));
    }
    of
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_task_has_one_part_and_no_part_has_much_more_than_its_share(
            weights in prop::collection::vec(0u64..1000, 0..60), count in 1usize..9,
        ) {
            let of = deal(&weights, count);
            prop_assert!(of.iter().all(|number| (1..=count).contains(number)));
            let load = |number| of.iter().zip(&weights).filter(|(n, _)| **n == number).map(|(_, w)| w).sum::<u64>();
            let most = (1..=count).map(load).max().unwrap();
            let (total, largest) = (weights.iter().sum::<u64>(), weights.iter().max().copied().unwrap_or(0));
            prop_assert!(most <= total / count as u64 + largest);
        }
    }

    #[test]
    fn parts_are_written_as_fractions() {
        assert_eq!("2/8".parse::<Part>().unwrap(), Part { number: 2, count: 8 });
        assert_eq!(Part::new(3, 3).unwrap().to_string(), "3/3");
        for text in ["0/4", "5/4", "1/0", "4", "a/b", "1/100001", "-1/4", ""] {
            assert!(text.parse::<Part>().is_err(), "{text}");
        }
    }

    /// Value of `--parts`, environment variables, and the expected part or error text.
    type Case<'a> = (Option<usize>, &'a [(&'a str, &'a str)], &'a str);

    #[test]
    fn schedulers_tell_the_part() {
        let part = |count: Option<usize>, variables: &[(&str, &str)]| {
            let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
            Part::from_scheduler(count, find).map(|part| part.to_string()).map_err(|e| e.to_string())
        };
        let slurm = |id, min, tasks| {
            [("SLURM_ARRAY_TASK_ID", id), ("SLURM_ARRAY_TASK_MIN", min), ("SLURM_ARRAY_TASK_COUNT", tasks)]
        };
        let cases: &[Case<'_>] = &[
            (Some(4), &slurm("1", "1", "4"), "1/4"),
            (Some(4), &slurm("4", "1", "4"), "4/4"),
            (None, &slurm("3", "1", "4"), "3/4"),
            (Some(4), &slurm("0", "0", "4"), "1/4"),
            (None, &slurm("3", "0", "4"), "4/4"),
            // Tasks 3 and 4 of an earlier array, submitted again.
            (Some(4), &slurm("3", "3", "2"), "3/4"),
            (Some(4), &[("JOB_COMPLETION_INDEX", "0")], "1/4"),
            (Some(4), &[("JOB_COMPLETION_INDEX", "3")], "4/4"),
            (None, &[("JOB_COMPLETION_INDEX", "2"), ("JOB_COMPLETIONS", "3")], "3/3"),
        ];
        for (count, variables, expected) in cases {
            assert_eq!(part(*count, variables).as_deref(), Ok(*expected), "{variables:?}");
        }
        let refused: &[Case<'_>] = &[
            (Some(4), &[], "neither"),
            (Some(4), &[("SLURM_ARRAY_TASK_ID", "")], "neither"),
            (Some(4), &[("SLURM_ARRAY_TASK_ID", "1"), ("JOB_COMPLETION_INDEX", "0")], "both"),
            (Some(4), &slurm("x", "1", "4"), "expected a number"),
            (Some(4), &slurm("5", "1", "8"), "SLURM_ARRAY_TASK_ID=5 is outside the 4 parts"),
            (Some(4), &slurm("0", "0", "1"), "SLURM_ARRAY_TASK_ID=0 is outside the 4 parts"),
            (Some(2), &[("JOB_COMPLETION_INDEX", "2")], "JOB_COMPLETION_INDEX=2 is outside the 2 parts"),
            (None, &[("JOB_COMPLETION_INDEX", "2")], "JOB_COMPLETIONS is not set"),
        ];
        for (count, variables, expected) in refused {
            let found = part(*count, variables).unwrap_err();
            assert!(found.contains(expected), "{variables:?}: {found}");
        }
    }
}
