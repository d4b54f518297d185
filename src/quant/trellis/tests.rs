//! Tests of the search against all streams, and of the quantizer against the errors that the format allows.

use super::*;
use crate::calibration::InputMeans;
use crate::quant::Quantizer;
use crate::quant::block::tile::dequantize_rows;
use crate::rng::Rng;
use crate::scheme::{Granularity, QuantSpec, Scheme, T2, T3, Trellis};

fn normal(rng: &mut Rng) -> f32 {
    rng.next_normal() as f32
}

fn random_lanes(rng: &mut Rng, scale: f32) -> [Lanes; STEPS] {
    std::array::from_fn(|_| std::array::from_fn(|_| scale * normal(rng)))
}

#[test]
fn a_search_without_feedback_finds_the_best_of_all_streams() {
    let mut rng = Rng::new(1);
    for level in [Level::BASELINE, Level::detect()] {
        let values = random_lanes(&mut rng, T2.spread as f32);
        let costs = std::array::from_fn(|_| rng.next_f64() as f32 + 0.1);
        let wanted = Wanted { values: &values, targets: &values, costs: &costs, feedback: None };
        let mut search = Search::new(level, &T2);
        let (found, known) = (search.find(&wanted), search.least_costs(&wanted));
        let lines = search.least_costs_of_lines(&wanted);
        let mut least = [f32::INFINITY; LANES];
        for stream in 0..1 << (2 * STEPS) {
            let costs = search.costs_of(&wanted, &[stream; LANES]);
            (0..LANES).for_each(|lane| least[lane] = least[lane].min(costs[lane]));
        }
        let of_found = search.costs_of(&wanted, &found.streams);
        for lane in 0..LANES {
            assert!((of_found[lane] - least[lane]).abs() <= 1e-4 * least[lane], "{} {}", of_found[lane], least[lane]);
            assert!((found.costs[lane] - least[lane]).abs() <= 1e-4 * least[lane]);
            assert_eq!(found.costs[lane], known[lane]);
        }
        let expected = least_of_lines(&wanted, &T2);
        for lane in 0..LANES {
            assert!(
                (lines[lane] - expected[lane]).abs() <= 1e-4 * expected[lane],
                "{} {}",
                lines[lane],
                expected[lane]
            );
            assert!(lines[lane] <= known[lane]);
        }
    }
}

/// Returns the least costs of streams that start and end in any state, step by step and index by index.
fn least_of_lines(wanted: &Wanted<'_>, trellis: &Trellis) -> Lanes {
    let states = 64 >> trellis.bits;
    std::array::from_fn(|lane| {
        let mut costs = vec![0f32; states];
        for step in 0..STEPS {
            let mut next = vec![f32::INFINITY; states];
            for (index, value) in trellis.values.iter().enumerate() {
                let cost = wanted.costs[step] * (wanted.targets[step][lane] - f32::from(*value)).powi(2);
                let to = &mut next[index >> trellis.bits];
                *to = to.min(costs[index & (states - 1)] + cost);
            }
            costs = next;
        }
        costs.into_iter().fold(f32::INFINITY, f32::min)
    })
}

#[test]
fn a_search_with_feedback_reports_the_costs_of_its_streams_and_beats_one_without() {
    let mut rng = Rng::new(2);
    let mut totals = [0f64; 2];
    for trellis in [&T2, &T3] {
        for _ in 0..8 {
            let values = random_lanes(&mut rng, trellis.spread as f32);
            let mut feedback = [[0f32; STEPS]; STEPS];
            for (row, j) in feedback.iter_mut().zip(0..) {
                row[j + 1..].iter_mut().for_each(|x| *x = 0.6 * normal(&mut rng));
            }
            let costs = std::array::from_fn(|_| rng.next_f64() as f32 + 0.1);
            let plain = Wanted { values: &values, targets: &values, costs: &costs, feedback: None };
            let wanted = Wanted { feedback: Some(&feedback), ..plain };
            let mut search = Search::new(Level::detect(), trellis);
            let (found, blind) = (search.find(&wanted), search.find(&plain));
            let own = search.costs_of(&wanted, &found.streams);
            let blind = search.costs_of(&wanted, &blind.streams);
            for lane in 0..LANES {
                assert!((found.costs[lane] - own[lane]).abs() <= 1e-3 * own[lane]);
                totals[0] += f64::from(own[lane]);
                totals[1] += f64::from(blind[lane]);
            }
        }
    }
    assert!(totals[0] < 0.7 * totals[1], "{totals:?}");
}

#[test]
fn local_factors_solve_their_equations() {
    let mut rng = Rng::new(3);
    let root: [[f32; STEPS]; STEPS] = std::array::from_fn(|_| std::array::from_fn(|_| normal(&mut rng)));
    let products: [[f32; STEPS]; STEPS] = std::array::from_fn(|i| {
        std::array::from_fn(|j| {
            (0..STEPS).map(|k| root[i][k] * root[j][k]).sum::<f32>() + if i == j { 1.0 } else { 0.0 }
        })
    });
    let local = Local::new(&products).unwrap();
    let wanted = random_lanes(&mut rng, 1.0);
    let mut solved = wanted;
    local.solve(&mut solved);
    for k in 0..STEPS {
        for lane in 0..LANES {
            let product: f32 = (0..STEPS).map(|j| solved[j][lane] * products[j][k]).sum();
            assert!((product - wanted[k][lane]).abs() < 1e-3, "{product} {}", wanted[k][lane]);
        }
    }
    assert!(Local::new(&[[1.0; STEPS]; STEPS]).is_none());
}

fn spec(scheme: Scheme, size: u32) -> QuantSpec {
    QuantSpec { granularity: Granularity::Group(size), ..QuantSpec::usual(scheme) }
}

/// Quantizes a matrix and returns the decoded weights.
fn quantized(spec: QuantSpec, method: Method, inputs: Option<&InputMeans>, cols: usize, values: &[f32]) -> Vec<f32> {
    let rows = values.len() / cols;
    let quant = TensorQuant { spec, method, clamp: None, percentile: None };
    let inputs = inputs.map(|inputs| InputStats::new(inputs, method).unwrap());
    let quantizer = Quantizer::new(quant, rows, cols).unwrap().with_inputs(inputs);
    let mut tiles = vec![0xAA; quantizer.layout().nbytes()];
    quantizer.encode_tiles(values, &mut tiles).unwrap();
    let mut decoded = vec![f32::NAN; values.len()];
    dequantize_rows(quantizer.layout(), &tiles, 0..rows, &mut decoded);
    decoded
}

#[test]
fn normal_weights_lose_what_the_format_allows() {
    let mut rng = Rng::new(4);
    let cols = 384;
    let values: Vec<f32> = (0..48 * cols).map(|_| 0.02 * normal(&mut rng)).collect();
    let error = |spec, method| {
        let decoded = quantized(spec, method, None, cols, &values);
        let squares: f32 = values.iter().zip(&decoded).map(|(x, y)| (x - y).powi(2)).sum();
        squares / values.iter().map(|x| x * x).sum::<f32>()
    };
    let cases = [
        (Scheme::T3, 32, MOST_T3[0]),
        (Scheme::T3, 128, MOST_T3[1]),
        (Scheme::T2, 32, MOST_T2[0]),
        (Scheme::T2, 128, MOST_T2[1]),
    ];
    for (scheme, size, most) in cases {
        let [plain, searched] = [Method::Rtn, Method::Search].map(|method| error(spec(scheme, size), method));
        assert!(searched <= most && searched <= plain * 1.001, "{} {size}: {plain} {searched}", scheme.name());
    }
}

/// Errors relative to the squares of the weights, in groups of 32 and 128, with 2 % more than measured.
const MOST_T3: [f32; 2] = [0.0240, 0.0258];
const MOST_T2: [f32; 2] = [0.0905, 0.0945];

#[test]
fn errors_are_compensated_where_inputs_are_correlated() {
    let mut rng = Rng::new(5);
    let (cols, samples) = (80, 400);
    let values: Vec<f32> = (0..20 * cols).map(|_| normal(&mut rng)).collect();
    // Inputs with a few strong directions.
    let directions: Vec<f32> = (0..4 * cols).map(|_| normal(&mut rng)).collect();
    let inputs: Vec<f32> = (0..samples)
        .flat_map(|_| {
            let shares: [f32; 4] = std::array::from_fn(|_| 2.0 * normal(&mut rng));
            let of = |k: usize| (0..4).map(|d| shares[d] * directions[d * cols + k]).sum::<f32>();
            (0..cols).map(|k| of(k) + normal(&mut rng)).collect::<Vec<f32>>()
        })
        .collect();
    let rows: Vec<&[f32]> = inputs.chunks_exact(cols).collect();
    let product = |i: usize, j: usize| rows.iter().map(|x| x[i] * x[j]).sum::<f32>() / samples as f32;
    let products: Vec<f32> = (0..cols * cols).map(|at| product(at / cols, at % cols)).collect();
    let squares = (0..cols).map(|i| products[i * cols + i]).collect();
    let means = InputMeans { squares, products: Some(products) };
    let error = |decoded: &[f32]| -> f64 {
        let of_row = |(w, q): (&[f32], &[f32])| -> f64 {
            rows.iter()
                .map(|x| x.iter().zip(w).zip(q).map(|((x, w), q)| f64::from(x * (w - q))).sum::<f64>().powi(2))
                .sum()
        };
        values.chunks_exact(cols).zip(decoded.chunks_exact(cols)).map(of_row).sum()
    };
    for scheme in [Scheme::T2, Scheme::T3] {
        let [search, gptq] = [(Method::Search, None), (Method::Gptq, Some(&means))]
            .map(|(method, inputs)| error(&quantized(spec(scheme, 32), method, inputs, cols, &values)));
        assert!(gptq < 0.5 * search, "{}: {gptq} against {search}", scheme.name());
    }
}
