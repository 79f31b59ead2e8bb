//! A strict reader of Prometheus text, and the one HTTP request that fetches it.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

use crate::manager::{Manager, PATIENCE};

/// One metric with its series.
#[derive(Clone, Debug)]
pub struct Family {
    /// `counter`, `gauge` or `histogram`.
    pub kind: String,
    /// Name of the sample, its labels and its value, in order.
    pub samples: Vec<Sample>,
}

/// One line with a value.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// With the suffix of a histogram's parts.
    pub name: String,
    /// By name.
    pub labels: BTreeMap<String, String>,
    /// Finite.
    pub value: f64,
}

/// Everything of one scrape, by name.
#[derive(Clone, Debug, Default)]
pub struct Exposition {
    /// By name.
    pub families: BTreeMap<String, Family>,
}

impl Exposition {
    /// The value of one series; the labels as `name=value`.
    ///
    /// # Panics
    /// When there is no such series.
    pub fn get(&self, name: &str, labels: &[&str]) -> f64 {
        let family = name.trim_end_matches("_bucket").trim_end_matches("_sum");
        let family = self.families.get(family.trim_end_matches("_count"));
        let family = family.unwrap_or_else(|| panic!("no metric {name}"));
        let wanted: BTreeSet<&str> = labels.iter().copied().collect();
        let found = family.samples.iter().find(|sample| {
            let pairs: Vec<String> =
                sample.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
            sample.name == name
                && pairs.iter().map(String::as_str).collect::<BTreeSet<_>>() == wanted
        });
        found.unwrap_or_else(|| panic!("no series {name} {labels:?}")).value
    }

    /// The sum over all series of a metric.
    ///
    /// # Panics
    /// When there is no such metric.
    pub fn sum(&self, name: &str) -> f64 {
        self.families[name].samples.iter().map(|sample| sample.value).sum()
    }

    /// Number of series.
    pub fn series(&self) -> usize {
        self.families.values().map(|family| family.samples.len()).sum()
    }
}

/// Reads a text, refusing everything that the format does not demand or allow.
///
/// # Panics
/// On the first violation.
pub fn parse(text: &str) -> Exposition {
    assert!(text.ends_with('\n'), "the last line has no end");
    let mut exposition = Exposition::default();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let help = line.strip_prefix("# HELP ").unwrap_or_else(|| panic!("no HELP: {line:?}"));
        let (name, words) = help.split_once(' ').expect("a help text");
        assert!(is_name(name) && !words.trim().is_empty(), "{line:?}");
        let line = lines.next().expect("a TYPE line");
        let kind = line.strip_prefix(&format!("# TYPE {name} ")).unwrap_or_else(|| {
            panic!("no TYPE of {name}: {line:?}");
        });
        assert!(["counter", "gauge", "histogram"].contains(&kind), "{line:?}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{line:?}");
        let mut samples: Vec<Sample> = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let sample = sample_of(line);
            let known = match kind {
                "histogram" => ["_bucket", "_sum", "_count"]
                    .into_iter()
                    .any(|suffix| sample.name.strip_suffix(suffix) == Some(name)),
                _ => sample.name == name,
            };
            assert!(known, "{line:?} in {name}");
            let twin = |other: &Sample| other.name == sample.name && other.labels == sample.labels;
            assert!(!samples.iter().any(twin), "twice: {line:?}");
            assert!(kind == "gauge" || sample.value >= 0.0, "{line:?}");
            samples.push(sample);
        }
        if kind == "histogram" {
            check_histogram(name, &samples);
        }
        let family = Family { kind: kind.to_owned(), samples };
        let before = exposition.families.insert(name.to_owned(), family);
        assert!(before.is_none(), "{name} twice");
    }
    exposition
}

fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit())
}

fn sample_of(line: &str) -> Sample {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line:?}"));
    let value: f64 = value.parse().unwrap_or_else(|_| panic!("no number: {line:?}"));
    assert!(value.is_finite(), "{line:?}");
    let (name, labels) = match series.split_once('{') {
        None => (series, BTreeMap::new()),
        Some((name, rest)) => {
            let pairs = rest.strip_suffix('}').unwrap_or_else(|| panic!("no brace: {line:?}"));
            (name, pairs.split(',').map(|pair| label_of(pair, line)).collect())
        }
    };
    assert!(is_name(name), "{line:?}");
    Sample { name: name.to_owned(), labels, value }
}

/// Values come from closed lists of words and numbers: nothing in them is ever escaped.
fn label_of(pair: &str, line: &str) -> (String, String) {
    let (name, value) = pair.split_once('=').unwrap_or_else(|| panic!("no label: {line:?}"));
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    let value = value.unwrap_or_else(|| panic!("no quotes: {line:?}"));
    let plain = |c: char| c.is_ascii_alphanumeric() || "_+-.".contains(c);
    assert!(is_name(name) && value.chars().all(plain) && !value.is_empty(), "{line:?}");
    (name.to_owned(), value.to_owned())
}

/// Buckets of one series grow with their ends, and the last is the count.
fn check_histogram(name: &str, samples: &[Sample]) {
    let mut series: BTreeMap<Vec<(String, String)>, Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        let labels = sample.labels.iter().filter(|(label, _)| *label != "le");
        let key = labels.map(|(name, value)| (name.clone(), value.clone())).collect();
        series.entry(key).or_default().push(sample);
    }
    for (labels, parts) in series {
        let of =
            |suffix: &'static str| parts.iter().filter(move |part| part.name.ends_with(suffix));
        let (mut end, mut below) = (f64::NEG_INFINITY, 0.0);
        for bucket in of("_bucket") {
            let le: f64 = bucket.labels["le"].parse().expect("an end");
            assert!(le > end && bucket.value >= below, "{name} {labels:?}: {bucket:?}");
            (end, below) = (le, bucket.value);
        }
        assert_eq!(end, f64::INFINITY, "{name} {labels:?}");
        let counts: Vec<f64> = of("_count").map(|part| part.value).collect();
        assert_eq!(counts, [below], "{name} {labels:?}");
        assert_eq!(of("_sum").count(), 1, "{name} {labels:?}");
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Everything in front of the body.
    pub head: String,
    /// Body.
    pub body: String,
}

/// Asks `address` for a page.
///
/// # Panics
/// When nothing that is HTTP comes.
pub fn get(address: &str, path: &str) -> Answer {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    connection.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status").parse().unwrap();
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

/// Where a Manager serves its metrics.
///
/// # Panics
/// When it serves none.
pub fn address(manager: &Manager) -> String {
    manager.inspect().manager.http.expect("started with --http")
}

/// What a Manager's `/metrics` say from now on: nothing of before this call.
pub fn scrape(manager: &Manager) -> Exposition {
    manager.fresh();
    let answer = get(&address(manager), "/metrics");
    assert_eq!(answer.status, 200, "{}", answer.head);
    parse(&answer.body)
}
