//! What the rounds found, as rows and as the keys of the contract.

use serde_json::{Value, json};

use super::engine::{Copies, Op, STAGES};
use super::shape::Shape;
use crate::series::{Row, number};
use crate::stats::median;

/// One operation of one shape.
#[derive(Debug)]
struct Found {
    shape: Shape,
    op: Op,
    way: String,
    ours_us: Vec<f64>,
    raw_us: Vec<f64>,
    /// Raw copies of another process; none in host memory.
    elsewhere_us: Vec<f64>,
    /// Ours over raw of each pair, and over raw elsewhere.
    ratios: Vec<f64>,
    ratios_elsewhere: Vec<f64>,
    /// First and last layer of restores by layer.
    layers_us: [Vec<f64>; 2],
    /// Of each of [`STAGES`].
    stages_us: [Vec<f64>; STAGES.len()],
}

impl Found {
    /// Both directions move the bytes of a shape each.
    fn bytes(&self) -> u64 {
        self.shape.bytes() * if self.op == Op::Both { 2 } else { 1 }
    }

    fn gb_per_s(&self) -> f64 {
        self.bytes() as f64 / 1e3 / median(&self.ours_us)
    }
}

/// All rounds.
#[derive(Debug, Default)]
pub(super) struct Results {
    found: Vec<Found>,
    delivery_ns: Vec<f64>,
}

impl Results {
    /// Adds one round of a shape.
    pub(super) fn add(&mut self, shape: &Shape, round: Vec<Copies>) {
        for copies in round {
            let known = self.found.iter();
            let mut known = known.map(|found| (found.shape, found.op));
            let found = match known.position(|known| known == (*shape, copies.op)) {
                Some(at) => &mut self.found[at],
                None => {
                    self.found.push(Found {
                        shape: *shape,
                        op: copies.op,
                        way: copies.way,
                        ours_us: Vec::new(),
                        raw_us: Vec::new(),
                        elsewhere_us: Vec::new(),
                        ratios: Vec::new(),
                        ratios_elsewhere: Vec::new(),
                        layers_us: [Vec::new(), Vec::new()],
                        stages_us: [const { Vec::new() }; STAGES.len()],
                    });
                    self.found.last_mut().expect("pushed just now")
                }
            };
            let (ours, raw) = (in_us(&copies.ours_ns), in_us(&copies.raw_ns));
            for times in &copies.layers_ns {
                let layers = found.layers_us.iter_mut().zip(times);
                layers.for_each(|(us, ns)| us.push(*ns as f64 / 1e3));
            }
            for times in &copies.stages_ns {
                let stages = found.stages_us.iter_mut().zip(times);
                stages.for_each(|(us, ns)| us.push(*ns as f64 / 1e3));
            }
            let elsewhere = in_us(&copies.elsewhere_ns);
            found.ratios.extend(ratios(&ours, &raw));
            found.ratios_elsewhere.extend(ratios(&ours, &elsewhere));
            found.ours_us.extend(ours);
            found.raw_us.extend(raw);
            found.elsewhere_us.extend(elsewhere);
            self.delivery_ns.extend(copies.delivery_ns.iter().map(|ns| *ns as f64));
        }
    }

    /// The list of the contract. A word that differs ends the benchmark before there is a list.
    pub(super) fn to_json(&self) -> Value {
        let result = |found: &Found| {
            let known = |values: &[f64]| (!values.is_empty()).then(|| number(median(values)));
            json!({
                "shape": found.shape.name,
                "op": found.op.label(),
                "bytes": found.bytes(),
                "segments": found.bytes() / found.shape.length,
                "ours_us_p50": number(median(&found.ours_us)),
                "ours_us_p99": number(p99(&found.ours_us)),
                "raw_us_p50": number(median(&found.raw_us)),
                "raw_method": found.way,
                "ratio": number(median(&found.ratios)),
                "raw_elsewhere_us_p50": known(&found.elsewhere_us),
                "ratio_over_raw_elsewhere": known(&found.ratios_elsewhere),
                "first_layer_us_p50": known(&found.layers_us[0]),
                "last_layer_us_p50": known(&found.layers_us[1]),
                "gb_per_s": number(found.gb_per_s()),
                "mismatches": 0,
                "samples": found.ours_us.len(),
            })
        };
        Value::Array(self.found.iter().map(result).collect())
    }

    /// Percentiles of the delivery.
    pub(super) fn delivery(&self) -> Value {
        let samples = self.delivery_ns.len();
        json!({
            "p50": number(median(&self.delivery_ns)),
            "p99": number(p99(&self.delivery_ns)),
            "samples": samples,
        })
    }

    /// 99th percentile of the delivery in ns; none before a restore.
    pub(super) fn delivery_p99(&self) -> Option<f64> {
        (!self.delivery_ns.is_empty()).then(|| p99(&self.delivery_ns))
    }

    /// The same as rows; the raw method is part of a name.
    pub(super) fn rows(&self) -> Vec<Row> {
        let mut rows = Vec::new();
        for found in &self.found {
            let name = |what: &str| format!("{}/{}/{what}", found.shape.name, found.op.label());
            let gb = found.ours_us.iter().map(|us| found.bytes() as f64 / 1e3 / us);
            rows.push(row(name("ours_us"), &found.ours_us));
            rows.push(row(name(&format!("raw_us[{}]", found.way)), &found.raw_us));
            rows.push(row(name("ratio"), &found.ratios));
            if !found.elsewhere_us.is_empty() {
                let place = format!("raw_elsewhere_us[{}]", found.way);
                rows.push(row(name(&place), &found.elsewhere_us));
                rows.push(row(name("ratio_over_raw_elsewhere"), &found.ratios_elsewhere));
            }
            for (what, us) in ["first_layer_us", "last_layer_us"].iter().zip(&found.layers_us) {
                if !us.is_empty() {
                    rows.push(row(name(what), us));
                }
            }
            for (stage, us) in STAGES.iter().zip(&found.stages_us) {
                if !us.is_empty() {
                    rows.push(row(name(&format!("{stage}_us")), us));
                }
            }
            rows.push(row(name("gb_per_s"), &gb.collect::<Vec<_>>()));
        }
        rows.push(row("delivery_ns".to_owned(), &self.delivery_ns));
        rows
    }
}

/// What was found while the GPU was busy.
#[derive(Debug)]
pub(super) struct Beside {
    kernels_alone: f64,
    runs: Vec<(Shape, Copies, f64)>,
}

impl Beside {
    /// Kernels a second without any copy.
    pub(super) fn new(kernels_alone: f64) -> Self {
        Self { kernels_alone, runs: Vec::new() }
    }

    /// Adds one run and the kernels a second meanwhile.
    pub(super) fn add(&mut self, shape: &Shape, copies: Copies, kernels: f64) {
        self.runs.push((*shape, copies, kernels));
    }

    pub(super) fn to_json(&self) -> Value {
        let run = |(shape, copies, kernels): &(Shape, Copies, f64)| {
            let (side, times, method) = side(copies);
            json!({
                "shape": shape.name,
                "op": copies.op.label(),
                "side": side,
                "method": method,
                "us_p50": number(median(&times)),
                "us_p99": number(p99(&times)),
                "samples": times.len(),
                "kernels_per_second": number(*kernels),
            })
        };
        let runs: Vec<_> = self.runs.iter().map(run).collect();
        json!({"kernels_per_second_alone": number(self.kernels_alone), "runs": runs})
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let mut rows =
            vec![row("beside_busy/kernels_per_second_alone".into(), &[self.kernels_alone])];
        for (shape, copies, kernels) in &self.runs {
            let (side, times, method) = side(copies);
            let place = format!("beside_busy/{}/{}", shape.name, copies.op.label());
            let method = if method.is_empty() { String::new() } else { format!("[{method}]") };
            rows.push(row(format!("{place}/{side}_us{method}"), &times));
            rows.push(row(format!("{place}/{side}_kernels_per_second"), &[*kernels]));
        }
        rows
    }
}

/// A run is of one side: whose, its times and the raw method.
fn side(copies: &Copies) -> (&'static str, Vec<f64>, &str) {
    if copies.raw_ns.is_empty() {
        ("ours", in_us(&copies.ours_ns), "")
    } else {
        ("raw", in_us(&copies.raw_ns), &copies.way)
    }
}

/// Of each pair.
fn ratios<'a>(ours: &'a [f64], raw: &'a [f64]) -> impl Iterator<Item = f64> + 'a {
    ours.iter().zip(raw).map(|(ours, raw)| ours / raw)
}

fn in_us(ns: &[u64]) -> Vec<f64> {
    ns.iter().map(|ns| *ns as f64 / 1e3).collect()
}

fn row(name: String, values: &[f64]) -> Row {
    Row {
        name,
        median: median(values),
        min: values.iter().copied().fold(f64::INFINITY, f64::min),
        max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        rounds: values.len(),
    }
}

fn p99(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::super::shape::SHAPES;
    use super::*;

    fn copies(op: Op, ours_ns: &[u64], raw_ns: &[u64]) -> Copies {
        let way = "2d_a_page".to_owned();
        Copies {
            op,
            ours_ns: ours_ns.into(),
            raw_ns: raw_ns.into(),
            elsewhere_ns: raw_ns.iter().map(|ns| 2 * ns).collect(),
            way,
            layers_ns: ours_ns.iter().map(|ns| [ns / 4, ns + 1_000]).collect(),
            delivery_ns: vec![-5, 70],
            stages_ns: vec![[1, 2, 3, 4]],
        }
    }

    #[test]
    fn rounds_become_the_keys_of_the_contract() {
        let mut results = Results::default();
        for _ in 0..2 {
            let both = copies(Op::Both, &[8_000, 12_000], &[4_000, 6_000]);
            results.add(&SHAPES[0], vec![copies(Op::Save, &[3_000], &[2_000]), both]);
        }
        let json = results.to_json();
        let (save, both) = (&json[0], &json[1]);
        assert_eq!(
            (&save["shape"], &save["op"], &save["bytes"]),
            (&json!("4k"), &json!("save"), &json!(4096))
        );
        assert_eq!((&both["bytes"], &both["segments"]), (&json!(8192), &json!(2)));
        assert_eq!(
            (&save["ours_us_p50"], &save["raw_us_p50"], &save["ratio"]),
            (&json!(3), &json!(2), &json!(1.5))
        );
        assert_eq!(
            (&save["raw_elsewhere_us_p50"], &save["ratio_over_raw_elsewhere"]),
            (&json!(4), &json!(0.75))
        );
        assert_eq!(
            (&save["first_layer_us_p50"], &save["last_layer_us_p50"]),
            (&json!(0.75), &json!(4))
        );
        assert_eq!((&both["ours_us_p99"], &both["gb_per_s"]), (&json!(12), &json!(0.8192)));
        assert_eq!(results.delivery()["p99"], 70);
        let names: Vec<_> = results.rows().into_iter().map(|row| row.name).collect();
        for name in ["raw_us[2d_a_page]", "published_us"] {
            assert!(names.contains(&format!("4k/both/{name}")), "{names:?}");
        }
    }

    #[test]
    fn a_run_beside_a_busy_gpu_is_of_one_side() {
        let mut beside = Beside::new(5_000.0);
        beside.add(&SHAPES[0], copies(Op::Restore, &[7_000], &[]), 4_900.0);
        beside.add(&SHAPES[0], copies(Op::Restore, &[], &[6_000]), 2_400.0);
        let json = beside.to_json();
        assert_eq!(
            (&json["runs"][0]["side"], &json["runs"][0]["us_p50"]),
            (&json!("ours"), &json!(7))
        );
        assert_eq!(json["runs"][1]["kernels_per_second"], 2400);
        let names: Vec<_> = beside.rows().into_iter().map(|row| row.name).collect();
        assert!(
            names.contains(&"beside_busy/4k/restore/raw_us[2d_a_page]".to_owned()),
            "{names:?}"
        );
    }
}
