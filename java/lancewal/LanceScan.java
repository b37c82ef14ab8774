package lancewal;

import com.fasterxml.jackson.databind.node.ObjectNode;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceReadInfo;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonScan;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.MetadataBuilder;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** One read of one state of a table, by Spark's own readers of Python data sources. */
final class LanceScan implements Scan {
  /** lancewal finds what a query asks for in the metadata of the first column. */
  private static final String REQUEST = "lancewal.request";

  private final PythonCalls.Description table;
  private final CaseInsensitiveStringMap options;
  private final StructType columns;
  /** The columns as Python sends them. */
  private final StructType packed;
  private final ObjectNode request;
  private final boolean limited;
  private PythonDataSourceReadInfo info;
  private Scan planned;

  LanceScan(
      PythonCalls.Description table,
      CaseInsensitiveStringMap options,
      StructType columns,
      ObjectNode request,
      boolean limited) {
    this.table = table;
    this.options = options;
    this.columns = columns;
    boolean isMerged = LanceExtensions.isMergedRead(options);
    this.packed = isMerged ? PackedLists.packed(columns) : columns;
    this.request = request;
    this.limited = limited;
  }

  /** What is read, if it came with the plan because it is little; else null. */
  Scan answer() {
    byte[] stream = Answers.streamOf(info());
    if (stream == null) {
      return null;
    }
    LanceAnswer few = LanceAnswer.of(stream, columns, description());
    return few != null ? few : new LanceRows(columns, stream, description());
  }

  @Override
  public StructType readSchema() {
    return columns;
  }

  @Override
  public String description() {
    return "lancewal " + options.get("path") + " " + String.join(", ", columns.fieldNames()) + " " + request;
  }

  @Override
  public ColumnarSupportMode columnarSupportMode() {
    return ColumnarSupportMode.UNSUPPORTED;
  }

  @Override
  public Batch toBatch() {
    Batch batch = planned().toBatch();
    if (packed != columns) {
      batch = new PackedLists(batch, packed);
    }
    return limited ? new ReadToTheEnd(batch, columns) : batch;
  }

  @Override
  public CustomMetric[] supportedCustomMetrics() {
    return PythonCalls.source().createPythonMetrics();
  }

  private synchronized Scan planned() {
    if (planned == null) {
      PythonDataSourceV2 source = PythonCalls.freshSource();
      source.setReadInfo(info());
      planned = new PythonScan(source, PythonCalls.FORMAT, packed, options, new Filter[0]);
    }
    return planned;
  }

  /** The state of the table is read here, once for each plan of a query, in one call of Python. */
  private synchronized PythonDataSourceReadInfo info() {
    if (info == null) {
      info = PythonCalls.source().createReadInfoInPython(table.created(), withRequest(), false);
    }
    return info;
  }

  private StructType withRequest() {
    StructField[] fields = packed.fields().clone();
    StructField first = fields[0];
    ObjectNode asked = request.deepCopy();
    if (packed != columns) {
      asked.set("packed", PackedLists.typesOf(columns));
    }
    fields[0] =
        new StructField(
            first.name(),
            first.dataType(),
            first.nullable(),
            new MetadataBuilder().withMetadata(first.metadata()).putString(REQUEST, asked.toString()).build());
    return new StructType(fields);
  }
}
