//! How the cost of a tick grows with the context and with the number of experts: `cargo bench -p r3 --bench cost` measures it and
//! writes `docs/cost.md` with its two charts. It takes a minute or two, and wants the machine for itself.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use r3_kernels::gemm::Dtype;
use r3_kernels::huge_pages::HugePages;
use r3_kernels::numerics::Numerics;
use r3_model::config::ModelConfig;
use r3_model::init::FreshWeights;
use r3_orchestrator::bench::engine::{EngineBench, EngineSetup, measure};
use r3_orchestrator::bench::subject::Subject;
use r3_telemetry::chart::{Chart, Scale, Series};
use serde_json::{Value, json};

#[global_allocator]
static MEMORY: HugePages = HugePages::new();

/// Tokens that each sequence holds when it decodes.
const CONTEXTS: [usize; 4] = [256, 1024, 4096, 16_384];
/// Experts of a layer.
const EXPERTS: [usize; 5] = [8, 16, 32, 64, 128];
/// Tokens that are sampled behind a context: few, so that it hardly grows meanwhile.
const NEW: usize = 32;
/// Positions of every model here.
const POSITIONS: usize = 16_384 + NEW;

fn main() -> Result<(), Box<dyn Error>> {
    // `cargo test --benches` runs benches, too, to see whether they start.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let contexts = curve(&CONTEXTS, |context| by_context(context, 2))?;
    let experts = curve(&EXPERTS, |n| by_experts(n, 64))?;
    let alone = curve(&EXPERTS, |n| by_experts(n, 1))?;
    write(
        &docs.join("cost-context.svg"),
        &chart(&contexts, "A decode tick over the context", "tokens of context"),
    )?;
    write(&docs.join("cost-experts.svg"), &chart(&experts, "A decode tick over the experts", "experts"))?;
    write(&docs.join("cost.md"), &page(&contexts, &experts, &alone))
}

fn write(path: &PathBuf, text: &str) -> Result<(), Box<dyn Error>> {
    eprintln!("writing {}", path.display());
    Ok(fs::write(path, text)?)
}

/// Measurements at several sizes of one thing.
struct Curve {
    sizes: Vec<usize>,
    measured: Vec<EngineBench>,
}

fn curve(
    sizes: &[usize],
    measure_at: impl Fn(usize) -> Result<EngineBench, Box<dyn Error>>,
) -> Result<Curve, Box<dyn Error>> {
    let mut measured = Vec::new();
    for &size in sizes {
        measured.push(measure_at(size)?);
        eprintln!("{size}: {:.0} us", measured[measured.len() - 1].decode_tick_us.median);
    }
    Ok(Curve { sizes: sizes.to_vec(), measured })
}

impl Curve {
    /// Size and microseconds of a decode tick.
    fn points(&self) -> Vec<(f64, f64)> {
        let ticks = self.measured.iter().map(|measured| measured.decode_tick_us.median);
        self.sizes.iter().map(|&size| size as f64).zip(ticks).collect()
    }

    fn line(&self) -> Line {
        Line::through(&self.points())
    }
}

/// The straight line `start + slope x` nearest to some points, by squares relative to their values, so that small ones
/// count as much as large ones.
#[derive(Clone, Copy)]
struct Line {
    start: f64,
    slope: f64,
}

impl Line {
    fn through(points: &[(f64, f64)]) -> Self {
        let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|&(x, y)| of(x, y) / (y * y)).sum::<f64>();
        let (n, x, xx) = (sum(&|_, _| 1.0), sum(&|x, _| x), sum(&|x, _| x * x));
        let (y, xy) = (sum(&|_, y| y), sum(&|x, y| x * y));
        let slope = (n * xy - x * y) / (n * xx - x * x);
        Self { start: (y - slope * x) / n, slope }
    }

    fn at(self, x: f64) -> f64 {
        self.start + self.slope * x
    }

    /// The point furthest from it, in percent of the line.
    fn worst_percent(self, points: &[(f64, f64)]) -> f64 {
        points.iter().map(|&(x, y)| (y / self.at(x) - 1.0).abs() * 100.0).fold(0.0, f64::max)
    }
}

fn subject(shape: &Value) -> Result<Subject, Box<dyn Error>> {
    let mut raw = json!({
        "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 512, "num_experts_per_tok": 4,
        "norm_topk_prob": true, "max_position_embeddings": POSITIONS,
    });
    let fields = raw.as_object_mut().ok_or("a configuration is an object")?;
    fields.extend(shape.as_object().ok_or("a shape is an object")?.clone());
    let config = ModelConfig::parse(fields.clone(), "config.json".as_ref())?;
    let source = Box::new(FreshWeights::new(&config, 0));
    Ok(Subject { config, source, dir: PathBuf::new() })
}

fn by_context(context: usize, batch: usize) -> Result<EngineBench, Box<dyn Error>> {
    let shape = json!({ "num_hidden_layers": 2, "num_experts": 16, "moe_intermediate_size": 128 });
    Ok(measure(&subject(&shape)?, &setup(batch, (context, NEW), 1))?)
}

fn by_experts(n_experts: usize, batch: usize) -> Result<EngineBench, Box<dyn Error>> {
    let shape = json!({ "num_hidden_layers": 4, "num_experts": n_experts, "moe_intermediate_size": 256 });
    Ok(measure(&subject(&shape)?, &setup(batch, (32, 128), 3))?)
}

fn setup(batch: usize, (prompt, new): (usize, usize), rounds: usize) -> EngineSetup {
    let (dtype, numerics) = (Dtype::Bf16, Numerics::Exact);
    EngineSetup { batch, prompt, new, rounds, dtype, numerics, routes: true }
}

fn chart(curve: &Curve, title: &'static str, along: &'static str) -> String {
    let (points, line) = (curve.points(), curve.line());
    let ends = [0.0, points[points.len() - 1].0];
    let chart = Chart {
        title,
        unit: "microseconds",
        along,
        scale: Scale::Linear,
        series: vec![
            Series { name: "measured", class: "a", points },
            Series { name: "straight line", class: "b", points: ends.map(|x| (x, line.at(x))).into() },
        ],
    };
    chart.svg_file()
}

fn page(contexts: &Curve, experts: &Curve, alone: &Curve) -> String {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("a CPU", |(_, name)| name);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (context_line, expert_line, alone_line) = (contexts.line(), experts.line(), alone.line());
    format!(
        "# What a tick costs\n\n\
         Written by `cargo bench -p r3 --bench cost` ([cost.rs](../benches/cost.rs)) on {threads} cores of {cpu}: bf16, routes captured,\n\
         random weights of width 256, top 4, 8 query heads over 2 of keys and values. A tick decodes one token of every sequence.\n\n\
         ## Over the context\n\n\
         ![microseconds of a decode tick over the context](cost-context.svg)\n\n\
         2 layers of 16 experts, 2 sequences.\n\n{}\n\
         The line is {:.0} µs + {:.1} ns a token of context; no tick is further than {:.0} % from it. It does not start at 0: the first\n\
         term is what does not look back, the second is attention, which reads the keys and values of every token before. Computing a\n\
         prompt token costs the same kind of line, over half the context: a token looks back over half of its prompt on average.\n\n\
         ## Over the experts\n\n\
         ![microseconds of a decode tick over the number of experts](cost-experts.svg)\n\n\
         4 layers; 64 sequences in the chart.\n\n{}\n\
         With 64 sequences the line is {:.0} µs + {:.1} µs an expert, and no tick is further than {:.0} % from it. The products do not\n\
         grow, since a token takes 4 experts however many there are; what grows is the weights that are read, as 256 pairs of token and\n\
         expert touch more of them, with fewer rows for each. One sequence touches 4 experts a layer whatever there is: its line is\n\
         {:.0} µs + {:.2} µs an expert, of which the router's own product is a part.\n",
        context_table(contexts),
        context_line.start,
        context_line.slope * 1e3,
        context_line.worst_percent(&contexts.points()),
        expert_table(experts, alone),
        expert_line.start,
        expert_line.slope,
        expert_line.worst_percent(&experts.points()),
        alone_line.start,
        alone_line.slope,
    )
}

fn context_table(curve: &Curve) -> String {
    let mut table = "| context | decode tick, µs | of the line | decoded tokens/s | µs a prompt token |\n| --- | --- | --- | --- | --- |\n".to_owned();
    for (&size, measured) in curve.sizes.iter().zip(&curve.measured) {
        let tick = measured.decode_tick_us.median;
        let prompt = measured.prefill_ms.median * 1e3 / (measured.batch * measured.prompt) as f64;
        let of_line = tick / curve.line().at(size as f64) * 100.0;
        let rate = measured.batch as f64 / tick * 1e6;
        table += &format!("| {size} | {tick:.0} | {of_line:.0} % | {rate:.0} | {prompt:.1} |\n");
    }
    table
}

fn expert_table(together: &Curve, alone: &Curve) -> String {
    let mut table = "| experts | decode tick of 64, µs | of the line | tokens/s | decode tick of 1, µs | tokens/s |\n| --- | --- | --- | --- | --- | --- |\n".to_owned();
    for ((&size, together_at), alone_at) in together.sizes.iter().zip(&together.measured).zip(&alone.measured)
    {
        let (tick, one) = (together_at.decode_tick_us.median, alone_at.decode_tick_us.median);
        let of_line = tick / together.line().at(size as f64) * 100.0;
        table += &format!(
            "| {size} | {tick:.0} | {of_line:.0} % | {:.0} | {one:.0} | {:.0} |\n",
            together_at.tokens_per_second.median, alone_at.tokens_per_second.median
        );
    }
    table
}
