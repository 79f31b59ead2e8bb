//! What every benchmark reports: its numbers beside their bars, and where they are from.

use serde_json::{Map, Value, json};

use crate::bar::Bar;
use crate::machine::{COMMIT, Machine};
use crate::series::{self, Row};

/// Everything that was measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// The numbers, in the order in which they are shown.
    pub rows: Vec<Row>,
    /// Numbers beside their bars.
    pub bars: Vec<Bar>,
    /// Where they were measured.
    pub machine: Machine,
    /// The commit that was measured.
    pub commit: &'static str,
    /// What else of the machine the numbers hang on, in words; none where that is all.
    pub setting: Option<String>,
    command: String,
    object: Map<String, Value>,
}

impl Report {
    /// The report of a benchmark that `command` ran on `cpus` CPUs. `object` holds what is shown as
    /// JSON of this benchmark alone.
    pub(crate) fn new(
        rows: Vec<Row>,
        bars: Vec<Bar>,
        cpus: usize,
        command: String,
        object: Map<String, Value>,
    ) -> Self {
        let machine = Machine::read(cpus);
        Self { rows, bars, machine, commit: COMMIT, setting: None, command, object }
    }

    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let mut all = self.object.clone();
        for (name, value) in [
            ("bars", json!(self.bars)),
            ("machine", json!(self.machine)),
            ("commit", json!(self.commit)),
            ("command", json!(self.command)),
        ] {
            all.insert(name.to_owned(), value);
        }
        Value::Object(all)
    }

    /// The same as lines of comma-separated values, after comments that say where they are from.
    pub fn to_csv(&self) -> String {
        let Machine { cpu, cpus, kernel, .. } = &self.machine;
        let setting = self.setting.iter().map(|words| format!("; {words}")).collect::<String>();
        let mut text = format!(
            "# {cpu}, {cpus} CPUs, Linux {kernel}{setting}\n# commit {}\n# {}\n\
             number,median,min,max,rounds\n",
            self.commit, self.command
        );
        for Row { name, median, min, max, rounds } in &self.rows {
            let [median, min, max] = [*median, *min, *max].map(series::number);
            text.push_str(&format!("{name},{median},{min},{max},{rounds}\n"));
        }
        text
    }
}

/// Medians by their names, and below `spread` the ranges that they are from.
pub(crate) fn summary<'a>(
    rows: impl IntoIterator<Item = (&'a str, &'a Row)>,
) -> Map<String, Value> {
    let (mut all, mut spread) = (Map::new(), Map::new());
    for (name, row) in rows {
        series::put(&mut all, name, series::number(row.median));
        let range = json!({
            "min": series::number(row.min),
            "max": series::number(row.max),
            "rounds": row.rounds,
        });
        series::put(&mut spread, name, range);
    }
    all.insert("spread".to_owned(), Value::Object(spread));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_say_where_the_numbers_are_from() {
        let row = Row { name: "a/b".into(), median: 2.0, min: 1.5, max: 3.25, rounds: 4 };
        let object = summary([("b", &row)]);
        let mut report = Report::new(vec![row], Vec::new(), 2, "bench".into(), object);
        let lines =
            |report: &Report| report.to_csv().lines().map(str::to_owned).collect::<Vec<_>>();
        let plain = lines(&report);
        assert_eq!(plain[2..], ["# bench", "number,median,min,max,rounds", "a/b,2,1.5,3.25,4"]);
        assert!(plain[1].starts_with("# commit ") && plain[0].contains(", 2 CPUs, Linux "));
        report.setting = Some("cold".into());
        assert_eq!(lines(&report)[0], format!("{}; cold", plain[0]));
        let json = report.to_json();
        assert_eq!(json["b"], 2);
        assert_eq!(json["spread"]["b"], json!({"min": 1.5, "max": 3.25, "rounds": 4}));
        assert_eq!((&json["command"], &json["bars"]), (&json!("bench"), &json!([])));
    }
}
