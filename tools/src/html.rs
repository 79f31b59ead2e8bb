//! One self-contained page about a replay: no script, nothing loaded from elsewhere.

use crate::replay::Report;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;\
padding:0 1rem;color:#1c2430;background:#fff}h1{font-size:1.4rem}table{border-collapse:collapse;\
width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #e3e7ee}\
.bar{display:flex;height:1.6rem;border-radius:.3rem;overflow:hidden;margin:1rem 0 .4rem}\
.dram{background:#2f6fde}.ssd{background:#7cb342}.miss{background:#c9ced8}\
.key span{margin-right:1.2rem}.fail{color:#b3261e;font-weight:600}";

/// The page.
pub(crate) fn page(report: &Report) -> String {
    let total = report.pages_total.max(1) as f64;
    let part = |class: &str, pages: u64| {
        format!(
            "<div class=\"{class}\" style=\"width:{:.3}%\"></div>",
            pages as f64 / total * 100.0
        )
    };
    let bar = [
        part("dram", report.pages_hit_dram),
        part("ssd", report.pages_hit_ssd),
        part("miss", report.pages_missed),
    ]
    .concat();
    let rows: String = report
        .rows()
        .iter()
        .map(|(name, value)| format!("<tr><th>{}</th><td>{}</td></tr>", text(name), text(value)))
        .collect();
    let failures: String = report
        .failures
        .iter()
        .map(|failure| format!("<p class=\"fail\">{}</p>", text(failure)))
        .collect();
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>OrbitKV: {name}</title>\
         <style>{STYLE}</style><h1>OrbitKV: {name}</h1>{failures}<div class=\"bar\">{bar}</div>\
         <p class=\"key\"><span>{dram} pages from DRAM (blue)</span><span>{ssd} from SSD (green)\
         </span><span>{missed} computed (grey)</span></p><table>{rows}</table>\
         <p><code>{command}</code>, version {version}</p></html>\n",
        name = text(&report.trace),
        dram = report.pages_hit_dram,
        ssd = report.pages_hit_ssd,
        missed = report.pages_missed,
        command = text(&report.run.command),
        version = text(&report.run.version),
    )
}

fn text(raw: &str) -> String {
    raw.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_name_becomes_markup_or_is_fetched() {
        let mut report = Report { trace: "<script>\"&".to_owned(), ..Report::default() };
        report.failures.push("a < b".to_owned());
        let page = page(&report);
        assert!(page.contains("&lt;script&gt;&quot;&amp;") && page.contains("a &lt; b"));
        assert!(!page.contains("<script") && !page.contains("http"));
    }
}
