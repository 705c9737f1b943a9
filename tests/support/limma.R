# limma's own answer: Rscript limma.R FOLDER. Reads samples.csv (group, block, covariates), terms.csv and counts.csv or
# values.csv (one row per gene), writes result.csv and prior.csv.
suppressMessages({library(limma); library(edgeR)})
folder <- commandArgs(trailingOnly = TRUE)[1]
here <- function(name) file.path(folder, name)
samples <- read.csv(here("samples.csv"), stringsAsFactors = TRUE)
terms <- read.csv(here("terms.csv"), stringsAsFactors = FALSE)
samples$group <- factor(as.character(samples$group), levels = strsplit(terms$groups, " ")[[1]])
precise <- function(x) formatC(x, digits = 17, format = "g")

compare <- function(against) {
  samples$group <- relevel(samples$group, against)
  design <- model.matrix(as.formula(paste("~ group", terms$formula)), samples)
  if (file.exists(here("values.csv"))) {
    v <- as.matrix(read.csv(here("values.csv"), header = FALSE))
    rownames(v) <- seq_len(nrow(v))
  } else {
    counts <- as.matrix(read.csv(here("counts.csv"), header = FALSE))
    rownames(counts) <- seq_len(nrow(counts))
    library <- colSums(counts)
    smallest <- min(table(samples$group))
    if (smallest > 10) smallest <- 10 + (smallest - 10) * 0.7
    keep <- rowSums(t(t(counts) / library) >= terms$min_count / mean(library)) >= smallest - 1e-9
    d <- DGEList(counts[keep, ], lib.size = library)
    if (terms$normalise == "rle") d <- calcNormFactors(d, method = "RLE")
    v <- voom(d, design)
  }
  eBayes(lmFit(v, design))
}

out <- NULL
for (pair in strsplit(strsplit(terms$contrasts, ";")[[1]], " ")) {
  fit <- compare(pair[2])
  found <- topTable(fit, coef = paste0("group", pair[1]), sort.by = "none", number = Inf)
  out <- rbind(out, data.frame(
    row = rownames(found), contrast = paste(pair, collapse = " "), average = precise(found$AveExpr),
    effect = precise(found$logFC), t = precise(found$t), p = precise(found$P.Value), fdr = precise(found$adj.P.Val)))
}
write.csv(out, here("result.csv"), row.names = FALSE, quote = FALSE)
write.csv(data.frame(df = precise(fit$df.prior), variance = precise(fit$s2.prior), residual = fit$df.residual[1]),
          here("prior.csv"), row.names = FALSE, quote = FALSE)
