//! Goal: the hit counts published with the traces (prefix LRU, and two exclusive tiers) are
//! reproduced to the last block. Method: the model in `support` replays the trace.

mod support;

use orbitkv_tools::simulate::{Policy, Simulation, Spill};
use support::{Counts, Model, published_trace};

const SHORT_REQUESTS: usize = 1500;

/// Runs models side by side over the short form of the agent trace.
fn short_form(sizes: &[(usize, usize)]) -> Option<Vec<Counts>> {
    let reader = published_trace("claude_v8_A_p64")?;
    let tokens = reader.info().block_tokens;
    let mut models: Vec<Model> = sizes.iter().map(|(dram, ssd)| Model::new(*dram, *ssd)).collect();
    for request in reader.take(SHORT_REQUESTS) {
        let request = request.unwrap();
        for model in &mut models {
            model.request(&request, tokens);
        }
    }
    Some(models.into_iter().map(|model| model.counts).collect())
}

#[test]
fn prefix_lru_hits_of_the_short_form() {
    let sizes = [(10_000, 0), (30_000, 0), (100_000, 0), (1_000_000, 0)];
    let Some(counts) = short_form(&sizes) else { return };
    assert!(counts.iter().all(|counts| counts.accesses == 2_392_517));
    let hits: Vec<u64> = counts.iter().map(|counts| counts.hits_dram).collect();
    assert_eq!(hits, [348_462, 1_488_254, 2_184_372, 2_200_255]);
}

#[test]
fn two_tier_hits_of_the_short_form() {
    let sizes = [(10_000, 30_000), (10_000, 100_000), (30_000, 100_000)];
    let Some(counts) = short_form(&sizes) else { return };
    let rows: Vec<[u64; 4]> =
        counts.iter().map(|c| [c.hits_dram, c.hits_ssd, c.demoted, c.dropped]).collect();
    assert_eq!(
        rows,
        [
            [348_462, 1_515_500, 2_016_168, 470_668],
            [348_462, 1_830_803, 2_016_168, 85_365],
            [1_488_254, 706_987, 874_263, 67_276],
        ]
    );
}

#[test]
fn prefix_lru_tokens_with_a_partial_tail() {
    let Some(reader) = published_trace("mooncake_conversation_b512") else { return };
    let tokens = reader.info().block_tokens;
    let mut models = [Model::new(10_000, 0), Model::new(10_000, 30_000)];
    for request in reader {
        let request = request.unwrap();
        for model in &mut models {
            model.request(&request, tokens);
        }
    }
    let single = models[0].counts;
    assert_eq!((single.accesses, single.hits_dram), (288_500, 61_046));
    assert_eq!(single.hit_tokens, 31_238_981);
    let both = models[1].counts;
    assert_eq!(
        [both.hits_dram, both.hits_ssd, both.demoted, both.dropped],
        [61_046, 40_336, 217_454, 147_118]
    );
}

/// Runs the Manager's decision code beside the model and compares request by request.
fn same_as_model(trace: &str, requests: usize, sizes: &[(u64, u64)]) {
    let Some(reader) = published_trace(trace) else { return };
    let info = reader.info().clone();
    let mut pairs: Vec<(Simulation, Model)> = sizes
        .iter()
        .map(|(dram, ssd)| {
            let simulation = Simulation::new(&info, *dram, *ssd, Policy::Lru, Spill::All);
            (simulation, Model::new(*dram as usize, *ssd as usize))
        })
        .collect();
    for (number, request) in reader.take(requests).enumerate() {
        let request = request.unwrap();
        for (simulation, model) in &mut pairs {
            simulation.request(&request);
            model.request(&request, info.block_tokens);
            let (row, counts) = (simulation.row(), model.counts);
            assert_eq!(
                [row.accesses, row.hit_pages_dram, row.hit_pages_ssd, row.hit_tokens],
                [counts.accesses, counts.hits_dram, counts.hits_ssd, counts.hit_tokens],
                "request {number} of {trace}, {} + {} pages",
                row.dram_pages,
                row.ssd_pages
            );
            assert_eq!(row.demoted_pages.unwrap_or(0), counts.demoted);
            assert_eq!(
                row.dropped_pages.unwrap_or(0),
                counts.dropped * u64::from(row.ssd_pages > 0)
            );
        }
    }
}

#[test]
fn the_decision_code_hits_what_the_model_hits() {
    let sizes = [(30_000, 0), (10_000, 30_000)];
    same_as_model("claude_v8_A_p64", SHORT_REQUESTS, &sizes);
}

#[test]
fn the_decision_code_hits_what_the_model_hits_when_requests_do_not_fit() {
    same_as_model("mooncake_conversation_b512", 3000, &[(100, 0), (100, 1000), (1000, 10_000)]);
}
